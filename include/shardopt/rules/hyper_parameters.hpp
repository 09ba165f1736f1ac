// SPDX-License-Identifier: Apache-2.0
#pragma once

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

/// Throws std::invalid_argument unless the value is finite and not negative.
inline void require_not_negative(std::string_view rule, std::string_view name, double value) {
  if (!math::is_finite(value) || !math::less_equal(0.0, value)) {
    refuse_hyper_parameter(rule, name, value, "a finite number >= 0");
  }
}

/// Throws std::invalid_argument unless 0 ≤ value < 1.
inline void require_fraction(std::string_view rule, std::string_view name, double value) {
  if (!math::less_equal(0.0, value) || !math::less(value, 1.0)) {
    refuse_hyper_parameter(rule, name, value, "in [0, 1)");
  }
}

}  // namespace shardopt::inline v0::detail
