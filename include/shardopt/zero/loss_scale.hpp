// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/config.hpp>
#include <shardopt/core/counts.hpp>
#include <shardopt/core/math.hpp>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace shardopt::inline v0 {

/// Dynamic loss scaling for fp16 gradients (Micikevicius et al. 2018): the engine multiplies its loss by the
/// scale, the step divides the gradient by it. Lives on the device, so that replayed graphs carry it on.
struct DynamicLossScale {
  float initial = 65536.0f;             ///< >= 2^-126; powers of two lose no bit
  float growth_factor = 2.0f;           ///< > 1
  float backoff_factor = 0.5f;          ///< in (0, 1)
  std::int64_t growth_interval = 2000;  ///< applied steps in a row before the scale grows; > 0
  std::int32_t hysteresis = 1;          ///< skipped steps before it falls, refilled when it grows; > 0
  float minimum = 1.0f;                 ///< a fall below it is an error; >= 2^-126, at most `initial`

  /// @throws std::invalid_argument naming the field and what is legal
  void validate() const {
    const auto require = [](bool legal, const char* what) {
      if (!legal) throw std::invalid_argument(std::string("shardopt: config.loss_scale: ") + what);
    };
    require(detail::is_loss_scale(initial), "initial must be at least 2^-126 and finite");
    require(math::less(1.0f, growth_factor) && math::is_finite(growth_factor),
            "growth_factor must be above 1 and finite");
    require(math::less(0.0f, backoff_factor) && math::less(backoff_factor, 1.0f),
            "backoff_factor must lie between 0 and 1");
    require(growth_interval > 0, "growth_interval must be at least 1");
    require(hysteresis > 0, "hysteresis must be at least 1");
    require(math::less_equal(detail::least_loss_scale, minimum) && math::less_equal(minimum, initial),
            "minimum must be at least 2^-126 and at most `initial`");
  }
};

}  // namespace shardopt::inline v0
