// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "options.hpp"

#include <shardopt/shardopt.hpp>

#include <cstdint>
#include <utility>
#include <vector>

namespace mlp {

/// A type as a value.
template <class T>
struct Type {
  using type = T;
};

/// What is stored in which type; the masters behind 16-bit parameters are the optimizer's.
using Fp32 = shardopt::Mixed<float, float, float>;
using Bf16 = shardopt::Mixed<shardopt::bf16, shardopt::bf16, float>;
using Bf16Fp32Grads = shardopt::Mixed<shardopt::bf16, float, float>;

/// Calls `use` with the types of parameters and gradients.
template <class Use>
auto with_precision(PrecisionKind kind, Use&& use) {
  switch (kind) {
    case PrecisionKind::fp32:
      break;
    case PrecisionKind::bf16:
      return use(Type<Bf16>{});
    case PrecisionKind::bf16_fp32_grads:
      return use(Type<Bf16Fp32Grads>{});
  }
  return use(Type<Fp32>{});
}

/// Calls `use` with the sharding: --zero 0 keeps everything on every rank.
template <class Use>
auto with_sharding(const Options& options, Use&& use) {
  const auto sized = [&](auto sharding) {
    if (options.bucket_bytes) sharding.bucket_bytes = *options.bucket_bytes;
    return use(sharding);
  };
  if (options.zero == 0) return sized(shardopt::Replicated{});
  if (options.sharding == ShardingKind::per_parameter) return sized(shardopt::PerParameterSharding{});
  return sized(shardopt::FlatSharding{});
}

/// Calls `use` with the update rule of weights; the one of biases differs in its weight decay only.
template <class Use>
auto with_rule(const Options& options, Use&& use) {
  const auto adaptive = [&](auto rule) {
    if (options.beta1) rule.beta1 = *options.beta1;
    if (options.beta2) rule.beta2 = *options.beta2;
    if (options.eps) rule.eps = *options.eps;
    return use(rule);
  };
  const double decay = options.weight_decay.value_or(options.optimizer == OptimizerKind::adamw ? 0.01 : 0.0);
  switch (options.optimizer) {
    case OptimizerKind::sgd:
      break;
    case OptimizerKind::adam:
      return adaptive(shardopt::Adam{.lr = options.learning_rate(), .weight_decay = decay});
    case OptimizerKind::adamw:
      return adaptive(shardopt::AdamW{.lr = options.learning_rate(), .weight_decay = decay});
  }
  return use(shardopt::SGD{.lr = options.learning_rate(),
                           .momentum = options.momentum.value_or(0.9),
                           .dampening = options.dampening.value_or(0.0),
                           .weight_decay = decay,
                           .nesterov = options.nesterov});
}

/// The library's name of the summation that was asked for.
inline shardopt::Reduction reduction_of(ReductionKind kind) {
  switch (kind) {
    case ReductionKind::automatic:
      break;
    case ReductionKind::native:
      return shardopt::Reduction::native;
    case ReductionKind::ordered:
      return shardopt::Reduction::ordered;
  }
  return shardopt::Reduction::automatic;
}

}  // namespace mlp
