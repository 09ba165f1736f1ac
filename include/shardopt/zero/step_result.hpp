// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace shardopt::inline v0 {

/// How many scalars of the engine's may ride in a step's small all-reduce.
inline constexpr int most_scalars = 4;

/// What a step came to: the same on all ranks.
struct StepResult {
  std::int64_t iteration = 0;  ///< steps taken, this one included
  std::int64_t updates = 0;  ///< steps applied so far (and skipped ones, where the configuration counts them)
  /// L2 norm of the gradient over all ranks, after gradient_scale and loss scale, before clipping; NaN if not
  /// finite, or if scales above 1 take it beyond fp32.
  double norm = 0;
  double scalars[most_scalars] =
      {};  ///< sums over ranks of the engine's scalars, exact, rounded once; NaN if one was not finite
  /// Infinite or NaN elements of the reduced gradient, and ranks whose gradient_scale was not finite.
  std::int64_t non_finite = 0;
  float clip_factor = 1;  ///< what the gradient was multiplied by beside the scales
  float loss_scale = 1;   ///< the scale that the loss had in this step
  bool skipped = false;   ///< parameters and state were left as they were
  /// Ranks had different hyper-parameters, factors, scales or numbers of updates: results are undefined. Seen
  /// by a digest of 24 bits: one difference in 16 million is not.
  bool inputs_differ = false;
  bool loss_scale_exhausted =
      false;  ///< the step was skipped, and the loss scale would have fallen below its minimum
};

}  // namespace shardopt::inline v0
