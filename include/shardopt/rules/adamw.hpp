// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/rules/basic_adam.hpp>

namespace shardopt::inline v0 {

/// AdamW (Loshchilov, Hutter: "Decoupled Weight Decay Regularization", 2019) as torch.optim.AdamW defines it.
///
///     p = p − lr·weight_decay·p
///     m = β₁·m + (1−β₁)·g        (g = grad, negated to maximize)
///     v = β₂·v + (1−β₂)·g²
///     p = p − lr · (m / (1−β₁ᵗ)) / (√(v / (1−β₂ᵗ)) + ε)
///
/// lr is the hyper-parameter times the step's lr_factor, t the number of the update. The decay comes before
/// the update and the moments do not see it. weight_decay is 0.01 unless given, as in PyTorch. ε stands
/// outside the root, after the bias correction. Two floats of state an element: "exp_avg" (m), "exp_avg_sq"
/// (v).
using AdamW = BasicAdam<WeightDecay::decoupled, false>;

/// AdamW with the AMSGrad change (Reddi, Kale, Kumar: "On the Convergence of Adam and Beyond", 2018): the
/// update divides by the root of the largest v so far. A third float of state: "max_exp_avg_sq".
using AdamWAmsgrad = BasicAdam<WeightDecay::decoupled, true>;

static_assert(OptimizerRule<AdamW>);
static_assert(OptimizerRule<AdamWAmsgrad>);

}  // namespace shardopt::inline v0
