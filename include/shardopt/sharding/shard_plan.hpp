// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/error.hpp>
#include <shardopt/core/range.hpp>

#include <algorithm>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace shardopt::inline v0 {

/// What a sharding policy sees: the trainable parameters as runs of the flat index, without gaps, in table
/// order.
struct FlatSpace {
  std::int64_t elements = 0;  ///< of all trainable parameters
  std::span<const std::int64_t> begins =
      {};  ///< first flat element of each non-empty parameter, ascending, begins[0] == 0

  /// End of the parameter that begins at begins[k].
  [[nodiscard]] std::int64_t end_of(std::size_t k) const noexcept {
    return k + 1 < begins.size() ? begins[k + 1] : elements;
  }
};

/// A run of the flat index and the rank that owns it.
struct OwnedRun {
  /// Elements of the flat index.
  Range flat;
  /// Rank that owns them.
  int owner = 0;
  /// By run and owner.
  friend bool operator==(const OwnedRun&, const OwnedRun&) = default;
};

/// Who owns which elements, and what is communicated together: the same on all ranks.
struct ShardPlan {
  std::vector<Range> buckets;  ///< consecutive, non-empty, cover the flat index
  std::vector<OwnedRun> runs;  ///< consecutive, non-empty, cover the flat index; cut at grain borders only

  /// The runs whose reduced gradient `rank` holds: a disjoint cover over the ranks.
  [[nodiscard]] std::vector<Range> reduced(int rank) const {
    std::vector<Range> result;
    for (const OwnedRun& run : runs) {
      if (run.owner == rank) result.push_back(run.flat);
    }
    return result;
  }

  /// Elements in `reduced(rank)`.
  [[nodiscard]] std::int64_t reduced_elements(int rank) const noexcept {
    std::int64_t sum = 0;
    for (const OwnedRun& run : runs) {
      if (run.owner == rank) sum += run.flat.size();
    }
    return sum;
  }
};

/// The most elements that can be planned, 2^48: what is counted in bytes from there on fits in 64 bits.
inline constexpr std::int64_t most_elements = std::int64_t{1} << 48;

namespace detail {

/// @throws std::invalid_argument for more elements than can be planned
inline void require_plannable(std::int64_t elements) {
  if (elements <= most_elements) return;
  throw std::invalid_argument("shardopt: the table holds " + std::to_string(elements) +
                              " trainable elements; at most 2^48 can be planned");
}

/// Whether a cut between flat elements border-1 and border splits no grain.
[[nodiscard]] inline bool is_grain_border(const FlatSpace& space, std::int64_t border) noexcept {
  return border % grain_elements == 0 || border == space.elements ||
         std::binary_search(space.begins.begin(), space.begins.end(), border);
}

template <class Runs, class RangeOf>
void require_cover(const FlatSpace& space, const Runs& runs, RangeOf range_of, const std::string& what) {
  std::int64_t at = 0;
  for (const auto& run : runs) {
    const Range range = range_of(run);
    if (range.begin != at || range.empty()) {
      throw std::invalid_argument("shardopt: the sharding policy's " + what +
                                  " must be consecutive and not empty; after element " + std::to_string(at) +
                                  " comes " + std::to_string(range.begin) + ".." + std::to_string(range.end));
    }
    if (!is_grain_border(space, range.end)) {
      throw std::invalid_argument("shardopt: the sharding policy cuts its " + what + " at flat element " +
                                  std::to_string(range.end) + ", which is neither a multiple of " +
                                  std::to_string(grain_elements) + " nor a parameter's border");
    }
    at = range.end;
  }
  if (at != space.elements) {
    throw std::invalid_argument("shardopt: the sharding policy's " + what + " end at " + std::to_string(at) +
                                " of " + std::to_string(space.elements) + " elements");
  }
}

/// Holds a policy to its contract. @throws std::invalid_argument that says what is broken
inline void require_valid(const FlatSpace& space, const ShardPlan& plan, int world) {
  require_cover(
      space, plan.buckets, [](const Range& r) { return r; }, "buckets");
  require_cover(
      space, plan.runs, [](const OwnedRun& r) { return r.flat; }, "owned runs");
  for (const OwnedRun& run : plan.runs) {
    if (run.owner < 0 || run.owner >= world) {
      throw std::invalid_argument("shardopt: the sharding policy names rank " + std::to_string(run.owner) +
                                  " as owner; there are " + std::to_string(world));
    }
  }
}

/// Elements in a bucket of `bucket_bytes`, at least one. @throws std::invalid_argument unless bucket_bytes >
/// 0
[[nodiscard]] inline std::int64_t bucket_elements(std::int64_t bucket_bytes, std::int64_t bytes_per_element) {
  if (bucket_bytes <= 0) {
    throw std::invalid_argument("shardopt: sharding.bucket_bytes must be at least 1, got " +
                                std::to_string(bucket_bytes) + " (the default is 32 MiB)");
  }
  return (std::max)(bucket_bytes / bytes_per_element, std::int64_t{1});
}

}  // namespace detail
}  // namespace shardopt::inline v0
