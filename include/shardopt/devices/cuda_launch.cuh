// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/range.hpp>
#include <shardopt/core/tile.hpp>

namespace shardopt::inline v0::detail {

/// Threads of a block in every kernel but the single-thread ones: a tile is eight elements a thread.
inline constexpr int block_threads = 256;
static_assert(tile_elements == 8 * block_threads, "a thread has its eight elements in one go");
static_assert(tile_elements / grain_elements <= block_threads / 32, "each grain of a tile has a warp");

}  // namespace shardopt::inline v0::detail
