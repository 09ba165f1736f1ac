// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>

namespace mlp {

/// Where a rank's loss of a step stands, in two parts that add up to more digits than one float has: scalars
/// that ride in the optimizer's step, which adds up the ranks' exactly.
using LossSum = std::array<const float*, 2>;

}  // namespace mlp
