// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/tile.hpp>
#include <shardopt/precision/precision_policy.hpp>
#include <shardopt/rules/rule.hpp>

#include <cstddef>
#include <cstdint>

namespace shardopt::inline v0 {

/// What the update kernel of a step is told: in device memory, written by the step's control.
struct StepVerdict {
  float gradient_factor;  ///< gradient_scale · clip factor
  std::uint32_t go;       ///< 0: leave everything as it is
};

/// Arguments of one bucket's update.
///
/// For each element of the tiles: gradient · factor, then Rule::update on the master (or the parameter where
/// it is its own), its states in place, and the parameter rounded from the master to nearest even.
template <OptimizerRule Rule, PrecisionPolicy Precision>
struct UpdateArguments {
  /// State buffers of the rule.
  static constexpr std::size_t states_count = state_count<Rule>;

  const Tile* tiles;                          ///< device memory
  std::int64_t tile_count;                    ///< in the bucket
  float* states[states_count + 1];            ///< base of each state buffer (the last entry is unused)
  typename Precision::Master* master;         ///< base of the master buffer, or null
  const typename Rule::Constants* constants;  ///< one a group, device memory
  const StepVerdict* verdict;                 ///< device memory
  bool stateful;  ///< false: the rule's states are zero, and neither read nor written
};

}  // namespace shardopt::inline v0
