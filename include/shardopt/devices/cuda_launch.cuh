// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/config.hpp>

namespace shardopt::inline v0::detail {

/// Threads of a block in every kernel but the single-thread ones: a tile is eight elements a thread.
inline constexpr int block_threads = 256;

}  // namespace shardopt::inline v0::detail
