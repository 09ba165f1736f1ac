// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace shardopt::inline v0 {

/// What a step came to: the same on all ranks.
struct StepResult {
  std::int64_t iteration = 0;  ///< steps taken, this one included
  std::int64_t updates = 0;  ///< steps applied so far (and skipped ones, where the configuration counts them)
  double norm = 0;  ///< L2 norm of the gradient over all ranks, after gradient_scale, before clipping; NaN if
                    ///< not finite
  float clip_factor = 1;        ///< what the gradient was multiplied by beside gradient_scale
  std::int64_t non_finite = 0;  ///< infinite or NaN elements of the reduced gradient
  bool skipped = false;         ///< parameters and state were left as they were
  bool inputs_differ =
      false;  ///< ranks passed different hyper-parameters, factors or scales: results are undefined
};

}  // namespace shardopt::inline v0
