// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/math.hpp>

#include <cstdint>
#include <limits>

namespace shardopt::inline v0 {

/// Steps and updates that may have been counted where a count is handed in: those that follow cannot overflow
/// it.
inline constexpr std::int64_t max_steps = (std::numeric_limits<std::int64_t>::max)() / 2;

namespace detail {

/// The gradient is multiplied by the inverse of a loss scale, which is finite for normal numbers.
inline constexpr float least_loss_scale = 0x1p-126f;

/// Whether a loss scale can be worked with.
[[nodiscard]] inline bool is_loss_scale(float value) noexcept {
  return math::less_equal(least_loss_scale, value) && math::is_finite(value);
}

}  // namespace detail
}  // namespace shardopt::inline v0
