// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/parameter_table.hpp>
#include <shardopt/rules/rule.hpp>

#include <concepts>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace shardopt::inline v0::checkpoint {

namespace detail {

/// The rule of an optimizer.
template <class Optimizer>
using RuleOf = std::remove_cvref_t<decltype(std::declval<const Optimizer&>().config().groups.front().rule)>;

}  // namespace detail

/// What can be saved and loaded: ZeroOptimizer models it, and says what each call does. One object a rank;
/// `exchange` and `restore_parameters` are collective.
template <class Optimizer>
concept Checkpointable = OptimizerRule<detail::RuleOf<Optimizer>> &&
    requires(Optimizer& optimizer, const Optimizer& view, typename Optimizer::Stream stream,
             const std::string& text, std::string_view name, const detail::RuleOf<Optimizer>& rule,
             std::span<const float> values) {
  typename Optimizer::Device;
  typename Optimizer::Param;
  typename Optimizer::Grad;
  { view.rank() } -> std::same_as<int>;
  { view.world() } -> std::same_as<int>;
  { view.table() } -> std::same_as<const ParameterTable&>;
  { view.config().groups.front().name } -> std::convertible_to<std::string_view>;
  { view.config().loss_scale.has_value() } -> std::same_as<bool>;
  { std::remove_cvref_t<decltype(view.config().sharding)>::name } -> std::convertible_to<std::string_view>;
  { view.memory_plan().buffers.front().name } -> std::convertible_to<std::string_view>;
  view.device();
  optimizer.transfer_memory();
  view.states();
  view.owned_states();
  view.counters(stream);
  { view.rule(name) } -> std::convertible_to<detail::RuleOf<Optimizer>>;
  view.require_rule(name, rule);
  view.require_between_steps(name);
  { optimizer.exchange(text) } -> std::same_as<std::vector<std::string>>;
  optimizer.set_rule(name, rule, stream);
  optimizer.set_counters(view.counters(stream), stream);
  optimizer.set_states(view.states(), values, stream);
  optimizer.restore_parameters(stream);
  optimizer.wait_parameters(stream);
  optimizer.synchronize(stream);
};

}  // namespace shardopt::inline v0::checkpoint
