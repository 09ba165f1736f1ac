// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/sharding/sharding_policy.hpp>

#include <algorithm>
#include <cstdint>
#include <string_view>

namespace shardopt::inline v0 {

/// Cuts the flat index into buckets and each bucket into equal slices, one a rank, whatever parameters they
/// cross (as in Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
/// Models").
///
/// Buckets are rounded up to a multiple of world · 256 elements, so that all but the last have equal slices;
/// the last is cut at multiples of 256 with the larger slices on the first ranks. Ranks differ by less than
/// 512 elements in all.
struct FlatSharding {
  std::int64_t bucket_bytes = std::int64_t{32} << 20;  ///< bytes of gradients sent as one; at least 1

  /// As it stands in messages and digests.
  static constexpr std::string_view name = "flat";
  /// @see ShardingPolicy
  static constexpr bool updates_everything = false;

  /// @throws std::invalid_argument unless bucket_bytes > 0, and for more than most_elements
  [[nodiscard]] ShardPlan plan(const FlatSpace& space, int world, std::int64_t gradient_bytes) const {
    detail::require_plannable(space.elements);
    const std::int64_t wanted =
        (std::min)(detail::bucket_elements(bucket_bytes, gradient_bytes), space.elements);
    const std::int64_t bucket = round_up((std::max)(wanted, std::int64_t{1}), world * grain_elements);
    ShardPlan result;
    for (std::int64_t begin = 0; begin < space.elements; begin += bucket) {
      const Range range{begin, (std::min)(begin + bucket, space.elements)};
      result.buckets.push_back(range);
      append_slices(range, world, result);
    }
    return result;
  }

 private:
  static void append_slices(Range bucket, int world, ShardPlan& result) {
    const std::int64_t grains = round_up(bucket.size(), grain_elements) / grain_elements;
    std::int64_t begin = bucket.begin;
    for (int rank = 0; rank < world; ++rank) {
      const std::int64_t share = grains / world + (rank < grains % world ? 1 : 0);
      const std::int64_t end = (std::min)(begin + share * grain_elements, bucket.end);
      if (end > begin) result.runs.push_back({{begin, end}, rank});
      begin = end;
    }
  }
};

static_assert(ShardingPolicy<FlatSharding>);

}  // namespace shardopt::inline v0
