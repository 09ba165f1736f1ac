// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "options.hpp"

#include <cmath>
#include <numbers>

namespace mlp {

/// The factor of the learning rate in a step: linear warm-up over `warmup` steps, then constant, or falling
/// to 0 at the end of the run along a line or half a cosine.
inline float lr_factor(ScheduleKind kind, int step, int steps, int warmup) {
  if (step < warmup) return static_cast<float>(step + 1) / static_cast<float>(warmup);
  const double passed = static_cast<double>(step - warmup) / static_cast<double>(steps - warmup);
  switch (kind) {
    case ScheduleKind::constant:
      return 1.0F;
    case ScheduleKind::linear:
      return static_cast<float>(1.0 - passed);
    case ScheduleKind::cosine:
      return static_cast<float>(0.5 * (1.0 + std::cos(std::numbers::pi * passed)));
  }
  return 1.0F;
}

}  // namespace mlp
