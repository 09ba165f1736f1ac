// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/blocks.hpp>
#include <shardopt/collectives/collective.hpp>
#include <shardopt/core/parameter_table.hpp>
#include <shardopt/precision/precision_policy.hpp>
#include <shardopt/rules/rule.hpp>
#include <shardopt/sharding/sharding_policy.hpp>
#include <shardopt/zero/config.hpp>
#include <shardopt/zero/shard_layout.hpp>
#include <shardopt/zero/step_memory.hpp>

#include <stdexcept>
#include <string>
#include <vector>

namespace shardopt::inline v0 {

/// Which rank of how many.
struct Placement {
  /// This rank: 0 .. world - 1.
  int rank = 0;
  /// Number of ranks.
  int world = 1;
};

namespace detail {

/// All of an optimizer that follows from table, configuration and placement alone: needs no device.
template <OptimizerRule Rule, ShardingPolicy Sharding, Collective Comm, PrecisionPolicy Precision>
struct Preparation {
  using Config = OptimizerConfig<Rule, Sharding>;
  using Grad = typename Precision::Grad;

  /// @param adopted  whether states and masters are the engine's own buffers
  /// @throws std::invalid_argument for whatever of the configuration does not fit
  Preparation(const ParameterTable& table, const Config& config, Placement placement, bool adopted)
      : reduction(resolved(config, placement)),
        stateful(keeps_state(config)),
        layout(table, names(config), config.sharding, placement.rank, placement.world, sizeof(Grad)),
        memory(
            plan_memory<Rule, Comm, Precision>(layout, config.groups.size(), reduction, stateful, adopted)) {}

  Reduction reduction;  ///< what Reduction::automatic became
  bool stateful;        ///< whether the rule's states are kept
  ShardLayout layout;
  PlannedMemory memory;

 private:
  static Reduction resolved(const Config& config, Placement placement) {
    config.validate();
    require_rank(placement.rank, placement.world, Comm::name);
    const Dtype type = dtype_of<Grad>;
    const Reduction reduction =
        config.reduction == Reduction::automatic ? Comm::automatic_reduction(type) : config.reduction;
    if (reduction == Reduction::ordered && placement.world > most_ordered_ranks) {
      throw std::invalid_argument("shardopt: config.reduction: an ordered reduction has at most " +
                                  std::to_string(most_ordered_ranks) + " ranks, not " +
                                  std::to_string(placement.world) + "; choose Reduction::native");
    }
    if (config.reduction == Reduction::automatic) return reduction;
    if (!Comm::supports(config.reduction, type)) {
      throw std::invalid_argument("shardopt: config.reduction: " + std::string(Comm::name) + " has no " +
                                  std::string(name_of(config.reduction)) + " reduction of " +
                                  std::string(name_of(type)) + "; leave it automatic (" +
                                  std::string(name_of(Comm::automatic_reduction(type))) + ")");
    }
    return reduction;
  }

  static bool keeps_state(const Config& config) {
    for (const auto& group : config.groups) {
      if (!stateless(group.rule)) return true;
    }
    return false;
  }

  static std::vector<std::string> names(const Config& config) {
    std::vector<std::string> result;
    for (const auto& group : config.groups) result.push_back(group.name);
    return result;
  }
};

}  // namespace detail
}  // namespace shardopt::inline v0
