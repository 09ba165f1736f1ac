// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/rules/basic_adam.hpp>

namespace shardopt::inline v0 {

/// Adam (Kingma, Ba: "Adam: A Method for Stochastic Optimization", 2015) as torch.optim.Adam defines it.
///
///     g = grad + weight_decay·p  (grad negated first to maximize)
///     m = β₁·m + (1−β₁)·g
///     v = β₂·v + (1−β₂)·g²
///     p = p − lr · (m / (1−β₁ᵗ)) / (√(v / (1−β₂ᵗ)) + ε)
///
/// lr is the hyper-parameter times the step's lr_factor, t the number of the update. Weight decay is an L2
/// penalty: the moments see it; see AdamW for the decoupled one. ε stands outside the root, after the bias
/// correction. Two floats of state an element: "exp_avg" (m), "exp_avg_sq" (v).
using Adam = BasicAdam<WeightDecay::l2, false>;

/// Adam with the AMSGrad change (Reddi, Kale, Kumar: "On the Convergence of Adam and Beyond", 2018): the
/// update divides by the root of the largest v so far. A third float of state: "max_exp_avg_sq".
using AdamAmsgrad = BasicAdam<WeightDecay::l2, true>;

static_assert(OptimizerRule<Adam>);
static_assert(OptimizerRule<AdamAmsgrad>);

}  // namespace shardopt::inline v0
