// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/sharding/sharding_policy.hpp>

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <vector>

namespace shardopt::inline v0 {

/// Cuts each parameter over all ranks at grain borders, in rank order, into runs that differ by at most one
/// grain; the ranks that own least so far get the extra grains. A parameter of fewer grains than ranks goes
/// grain by grain to the rank that owns least, the lowest on ties.
///
/// A bucket is one or more whole parameters: as many as fit in bucket_bytes, at least one.
struct PerParameterSharding {
  std::int64_t bucket_bytes = std::int64_t{32} << 20;  ///< bytes of gradients sent as one; at least 1

  /// As it stands in messages and digests.
  static constexpr std::string_view name = "per-parameter";
  /// @see ShardingPolicy
  static constexpr bool updates_everything = false;

  /// @throws std::invalid_argument unless bucket_bytes > 0, and for more than most_elements
  [[nodiscard]] ShardPlan plan(const FlatSpace& space, int world, std::int64_t gradient_bytes) const {
    detail::require_plannable(space.elements);
    const std::int64_t capacity = detail::bucket_elements(bucket_bytes, gradient_bytes);
    ShardPlan result;
    std::vector<std::int64_t> load(static_cast<std::size_t>(world), 0);
    for (std::size_t k = 0; k < space.begins.size(); ++k) {
      const Range parameter{space.begins[k], space.end_of(k)};
      if (result.buckets.empty() || result.buckets.back().size() + parameter.size() > capacity) {
        result.buckets.push_back(parameter);
      } else {
        result.buckets.back().end = parameter.end;
      }
      if (grains_of(parameter) < world) {
        deal(parameter, load, result);
      } else {
        cut(parameter, load, result);
      }
    }
    return result;
  }

 private:
  [[nodiscard]] static std::int64_t grains_of(Range parameter) noexcept {
    return round_up(parameter.end, grain_elements) / grain_elements - parameter.begin / grain_elements;
  }

  /// Where the run of `grains` grains that begins at `begin` ends.
  [[nodiscard]] static std::int64_t end_after(std::int64_t begin, std::int64_t grains,
                                              Range parameter) noexcept {
    return (std::min)((begin / grain_elements + grains) * grain_elements, parameter.end);
  }

  static void deal(Range parameter, std::vector<std::int64_t>& load, ShardPlan& result) {
    for (std::int64_t begin = parameter.begin; begin < parameter.end;) {
      const auto least = std::min_element(load.begin(), load.end());
      const Range grain{begin, end_after(begin, 1, parameter)};
      result.runs.push_back({grain, static_cast<int>(least - load.begin())});
      *least += grain.size();
      begin = grain.end;
    }
  }

  static void cut(Range parameter, std::vector<std::int64_t>& load, ShardPlan& result) {
    const std::int64_t world = static_cast<std::int64_t>(load.size());
    std::vector<std::int64_t> share(load.size(), grains_of(parameter) / world);
    std::vector<std::size_t> by_load(load.size());
    for (std::size_t rank = 0; rank < load.size(); ++rank) by_load[rank] = rank;
    std::stable_sort(by_load.begin(), by_load.end(),
                     [&](std::size_t a, std::size_t b) { return load[a] < load[b]; });
    for (std::int64_t k = 0; k < grains_of(parameter) % world; ++k)
      ++share[by_load[static_cast<std::size_t>(k)]];
    std::int64_t begin = parameter.begin;
    for (std::size_t rank = 0; rank < load.size(); ++rank) {
      const Range run{begin, end_after(begin, share[rank], parameter)};
      result.runs.push_back({run, static_cast<int>(rank)});
      load[rank] += run.size();
      begin = run.end;
    }
  }
};

static_assert(ShardingPolicy<PerParameterSharding>);

}  // namespace shardopt::inline v0
