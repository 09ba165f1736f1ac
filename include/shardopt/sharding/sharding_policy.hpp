// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/sharding/shard_plan.hpp>

#include <concepts>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace shardopt::inline v0 {

/// Decides who owns which elements.
///
/// A trivially copyable aggregate with
///  - `name`: as it stands in messages and digests;
///  - `updates_everything`: false: a rank keeps state for `reduced(rank)`, and parameters are gathered after
///  the update (ZeRO-1);
///    true: every rank keeps all state, and reduced gradients are gathered before it;
///  - `plan(space, world, gradient_bytes)`: a pure function of its arguments, the same on every rank;
///  `gradient_bytes`
///    are those of one gradient element on the wire.
template <class Policy>
concept ShardingPolicy = std::is_trivially_copyable_v<Policy> && std::is_aggregate_v<Policy> &&
    requires(const Policy policy, const FlatSpace& space, int world, std::int64_t gradient_bytes) {
  { Policy::name } -> std::convertible_to<std::string_view>;
  {std::bool_constant<Policy::updates_everything>{}};
  { policy.plan(space, world, gradient_bytes) } -> std::same_as<ShardPlan>;
};

}  // namespace shardopt::inline v0
