// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>

namespace shardopt::inline v0 {

/// Steps and updates that may have been counted where a count is handed in: those that follow cannot overflow
/// it.
inline constexpr std::int64_t max_steps = (std::numeric_limits<std::int64_t>::max)() / 2;

}  // namespace shardopt::inline v0
