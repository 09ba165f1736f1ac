// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/math.hpp>

namespace shardopt::inline v0::detail {

/// Levels of the tree on a device, where each takes a register.
inline constexpr int device_rank_levels = 12;

/// Sum over ranks by the fixed tree: adjacent pairs level by level, an odd last one carried up.
///
/// Works like a binary counter: partial[k] holds a finished subtree of 2^k ranks. A subtree of two adjacent
/// ranks is what one rank gets that adds two micro-batches first; hence k ranks with two micro-batches equal
/// 2k ranks with one. The loops over levels unroll, so that on a device the partial sums stay in registers.
/// @param load  called as load(rank), once for each rank in order; gives a V: float, or a pack of floats
/// @pre 0 < world < 2^levels
SHARDOPT_CALLS_EITHER
template <int levels, class V, class Load>
SHARDOPT_RULE V sum_over_ranks(int world, const Load& load) {
  V partial[levels];
  SHARDOPT_UNROLL
  for (int level = 0; level < levels; ++level) partial[level] = V(0.0f);
  for (int rank = 0; rank < world; ++rank) {
    V sum = load(rank);
    bool placed = false;
    SHARDOPT_UNROLL
    for (int level = 0; level < levels; ++level) {
      if (placed) continue;
      placed = ((rank >> level) & 1) == 0;
      if (placed) {
        partial[level] = sum;
      } else {
        sum = math::add(partial[level], sum);
      }
    }
  }
  V total(0.0f);
  bool started = false;
  SHARDOPT_UNROLL
  for (int level = 0; level < levels; ++level) {
    if (((world >> level) & 1) == 0) continue;
    total = started ? math::add(partial[level], total) : partial[level];
    started = true;
  }
  return total;
}

}  // namespace shardopt::inline v0::detail
