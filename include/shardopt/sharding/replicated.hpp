// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/sharding/flat_sharding.hpp>

#include <cstdint>
#include <string_view>

namespace shardopt::inline v0 {

/// No sharding: every rank keeps all state and updates every parameter. Gradients are reduced as under
/// FlatSharding, in the same order, and gathered; so the result is the same bits, at the memory of plain data
/// parallelism.
struct Replicated {
  std::int64_t bucket_bytes = std::int64_t{32} << 20;  ///< bytes of gradients sent as one; at least 1

  /// As it stands in messages and digests.
  static constexpr std::string_view name = "replicated";
  /// @see ShardingPolicy
  static constexpr bool updates_everything = true;

  /// @throws std::invalid_argument unless bucket_bytes > 0
  [[nodiscard]] ShardPlan plan(const FlatSpace& space, int world, std::int64_t gradient_bytes) const {
    return FlatSharding{.bucket_bytes = bucket_bytes}.plan(space, world, gradient_bytes);
  }
};

static_assert(ShardingPolicy<Replicated>);

}  // namespace shardopt::inline v0
