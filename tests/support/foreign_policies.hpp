// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/math.hpp>
#include <shardopt/rules/rule.hpp>
#include <shardopt/sharding/sharding_policy.hpp>

#include <algorithm>
#include <cstdint>
#include <string_view>

/// Policies as users write them.
namespace test {

namespace so = shardopt;

/// Steps by the sign of a running mean, and counts the updates of each element: shows an element that was
/// missed or met twice.
struct SignRule {
  float lr = 1e-2f;
  float decay = 0.75f;

  template <class V>
  struct State {
    V mean;
    V visits;
  };
  struct Constants {
    float negative_lr;
    float decay;
    float taken;
  };

  [[nodiscard]] SHARDOPT_HD Constants constants(so::StepScalars scalars) const {
    return {so::math::neg(so::math::mul(lr, scalars.lr_factor)), decay, so::math::sub(1.0f, decay)};
  }

  template <class V>
  [[nodiscard]] SHARDOPT_RULE static V update(Constants c, V param, V grad, State<V>& state) {
    state.mean = so::math::fma(c.decay, state.mean, so::math::mul(c.taken, grad));
    state.visits = so::math::add(state.visits, V(1.0f));
    const V sign = so::math::select(so::math::equal(state.mean, V(0.0f)), V(0.0f),
                                    so::math::copysign(V(1.0f), state.mean));
    return so::math::fma(c.negative_lr, sign, param);
  }
};
static_assert(so::OptimizerRule<SignRule>);

/// Deals grain after grain to the ranks in a stride of three, so that no rank's slices lie together; buckets
/// hold a given number of grains and grow.
struct ScatterSharding {
  std::int64_t grains = 3;  ///< in the first bucket; each further one holds one more

  static constexpr std::string_view name = "scatter";
  static constexpr bool updates_everything = false;

  [[nodiscard]] so::ShardPlan plan(const so::FlatSpace& space, int world, std::int64_t) const {
    so::ShardPlan plan;
    std::int64_t left = 0;
    std::int64_t size = grains;
    std::size_t parameter = 0;
    std::int64_t index = 0;
    for (std::int64_t begin = 0; begin < space.elements; ++index) {
      const std::int64_t border = (begin / so::grain_elements + 1) * so::grain_elements;
      const std::int64_t end = std::min(border, space.end_of(parameter));
      plan.runs.push_back({{begin, end}, static_cast<int>((index * 3 + 1) % world)});
      if (left == 0) {
        plan.buckets.push_back({begin, end});
        left = size++;
      }
      plan.buckets.back().end = end;
      --left;
      if (end == space.end_of(parameter)) ++parameter;
      begin = end;
    }
    return plan;
  }
};
static_assert(so::ShardingPolicy<ScatterSharding>);

}  // namespace test
