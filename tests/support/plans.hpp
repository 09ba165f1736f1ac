// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/sharding/shard_plan.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace test {

namespace so = shardopt;

/// A flat space of tensors of these sizes (none of them 0).
struct Space {
  explicit Space(const std::vector<std::int64_t>& sizes) {
    for (const std::int64_t size : sizes) {
      begins.push_back(elements);
      elements += size;
    }
  }
  [[nodiscard]] so::FlatSpace view() const { return {elements, begins}; }

  std::int64_t elements = 0;
  std::vector<std::int64_t> begins;
};

/// Spaces of every kind: nothing, less than a rank, sizes around cuts, many small ones, one large one.
[[nodiscard]] inline std::vector<Space> spaces() {
  return {Space({}),
          Space({1}),
          Space({3, 5, 7, 1, 64, 9}),
          Space({255}),
          Space({256}),
          Space({257}),
          Space({255, 1, 256, 257, 513}),
          Space({2047, 2048, 2049, 1, 997}),
          Space(std::vector<std::int64_t>(40, 30)),
          Space({100003}),
          Space({1, 5000, 1, 3000, 1, 12345})};
}

/// What breaks the contract of a plan: a cover, in order, cut only at multiples of 256 and at borders of
/// tensors. Empty if nothing does.
[[nodiscard]] inline std::string broken(const Space& space, const so::ShardPlan& plan, int world) {
  const auto is_border = [&](std::int64_t at) {
    bool border = at % 256 == 0 || at == space.elements;
    for (const std::int64_t begin : space.begins) border = border || begin == at;
    return border;
  };
  std::int64_t at = 0;
  for (const so::Range& bucket : plan.buckets) {
    if (bucket.begin != at || bucket.end <= at)
      return "buckets do not follow each other at " + std::to_string(at);
    at = bucket.end;
    if (!is_border(at)) return "a bucket ends at " + std::to_string(at);
  }
  if (at != space.elements) return "buckets end at " + std::to_string(at);
  at = 0;
  for (const so::OwnedRun& run : plan.runs) {
    if (run.flat.begin != at || run.flat.end <= at)
      return "runs do not follow each other at " + std::to_string(at);
    at = run.flat.end;
    if (!is_border(at)) return "a run ends at " + std::to_string(at);
    if (run.owner < 0 || run.owner >= world) return "rank " + std::to_string(run.owner) + " owns a run";
  }
  if (at != space.elements) return "runs end at " + std::to_string(at);
  return "";
}

}  // namespace test
