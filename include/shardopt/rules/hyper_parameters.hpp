// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/config.hpp>
#include <shardopt/core/math.hpp>

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace shardopt::inline v0::detail {

[[noreturn]] inline void refuse_hyper_parameter(std::string_view rule, std::string_view name, double value,
                                                std::string_view legal) {
  std::ostringstream text;
  text.precision(17);
  text << "shardopt: " << rule << ": " << name << " is ";
  if (math::is_nan(value)) {
    text << "NaN";
  } else {
    text << value;
  }
  text << "; it must be " << legal;
  throw std::invalid_argument(text.str());
}

/// Whether a number is finite, and still is when it is rounded to float.
[[nodiscard]] inline bool is_finite_float(double value) { return math::is_finite(math::narrow(value)); }

/// Throws std::invalid_argument unless the value is finite, as a float too, and not negative.
inline void require_not_negative(std::string_view rule, std::string_view name, double value) {
  if (!is_finite_float(value) || !math::less_equal(0.0, value)) {
    refuse_hyper_parameter(rule, name, value, "a finite number >= 0 that a float can hold");
  }
}

/// Throws std::invalid_argument unless 0 ≤ value < 1.
inline void require_fraction(std::string_view rule, std::string_view name, double value) {
  if (!math::less_equal(0.0, value) || !math::less(value, 1.0)) {
    refuse_hyper_parameter(rule, name, value, "in [0, 1)");
  }
}

/// A number as a float, the largest of its sign where it is larger: what is multiplied by a gradient of 0
/// must not be infinite.
[[nodiscard]] SHARDOPT_HD_INLINE float narrow_finite(double value) noexcept {
  constexpr float largest = 0x1.fffffep127f;
  return math::maximum(math::minimum(math::narrow(value), largest), -largest);
}

}  // namespace shardopt::inline v0::detail
