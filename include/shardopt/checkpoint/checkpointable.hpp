// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/parameter_table.hpp>

#include <concepts>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace shardopt::inline v0::checkpoint {

/// What can be saved and loaded: ZeroOptimizer models it. One object a rank; `exchange` is collective.
template <class Optimizer>
concept Checkpointable = requires(Optimizer& optimizer, const Optimizer& view,
                                  typename Optimizer::Stream stream, const std::string& text,
                                  std::string_view name, std::span<const float> values) {
  typename Optimizer::Device;
  typename Optimizer::Param;
  typename Optimizer::Grad;
  { view.rank() } -> std::same_as<int>;
  { view.world() } -> std::same_as<int>;
  { view.table() } -> std::same_as<const ParameterTable&>;
  view.config().groups;
  view.config().sharding;
  view.device();
  optimizer.transfer_memory();
  view.states();
  view.owned_states();
  view.counters(stream);
  view.require_between_steps(name);
  { optimizer.exchange(text) } -> std::same_as<std::vector<std::string>>;
  optimizer.set_counters(view.counters(stream), stream);
  optimizer.set_states(view.states(), values, stream);
  optimizer.restore_parameters(stream);
  optimizer.wait_parameters(stream);
  optimizer.synchronize(stream);
};

}  // namespace shardopt::inline v0::checkpoint
