// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <laws/cuda/workload.hpp>
#include <shardopt/precision/mixed.hpp>
#include <shardopt/rules/adam.hpp>
#include <shardopt/rules/adamw.hpp>
#include <shardopt/rules/sgd.hpp>
#include <shardopt/sharding/flat_sharding.hpp>
#include <shardopt/sharding/per_parameter_sharding.hpp>
#include <shardopt/sharding/replicated.hpp>
#include <shardopt/zero/config.hpp>
#include <support/foreign_policies.hpp>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// Rules × policies × precisions, so chosen that every pair of a policy and a precision, and almost every
/// pair of a rule and another, occurs: nvcc takes seconds for each.
namespace test {

template <class R, class S, class P>
struct Case {
  using Rule = R;
  using Sharding = S;
  using Precision = P;
  static constexpr ElementTypes types{so::dtype_of<typename P::Param>, so::dtype_of<typename P::Grad>};
};

/// Groups with unequal hyper-parameters. @param variant  0, or 1 for other settings (SGD: without state)
template <class Rule>
[[nodiscard]] std::vector<so::Group<Rule>> groups_of(int variant) {
  if constexpr (std::is_same_v<Rule, so::SGD>) {
    if (variant == 1)
      return {{"plain", {.lr = 0.05}}, {"decay", {.lr = 0.02, .weight_decay = 0.1}}, {"fast", {.lr = 0.3}}};
    return {{"plain", {.lr = 0.05, .momentum = 0.9}},
            {"decay", {.lr = 0.02, .momentum = 0.8, .weight_decay = 0.1, .nesterov = true}},
            {"fast", {.lr = 0.3, .momentum = 0.5, .dampening = 0.25, .maximize = true}}};
  } else if constexpr (std::is_same_v<Rule, SignRule>) {
    return {{"plain", {}}, {"decay", {.lr = 3e-3f, .decay = 0.875f}}, {"fast", {.lr = 0.1f, .decay = 0.0f}}};
  } else {
    return {{"plain", {.lr = 1e-2, .eps = variant == 1 ? 1e-3 : 1e-8}},
            {"decay", {.lr = 3e-3, .beta1 = 0.8, .beta2 = 0.99, .weight_decay = 0.1}},
            {"fast", {.lr = 0.1, .beta1 = 0.5, .beta2 = 0.9999, .maximize = true}}};
  }
}

/// Replaces what the workload says.
template <class Rule>
void override_with(const Workload::Hyper& hyper, Rule& rule) {
  const auto set = [](auto& field, const std::optional<double>& value) {
    if (value) field = static_cast<std::remove_reference_t<decltype(field)>>(*value);
  };
  set(rule.lr, hyper.lr);
  if constexpr (requires { rule.eps; }) {
    set(rule.beta1, hyper.beta1);
    set(rule.beta2, hyper.beta2);
    set(rule.eps, hyper.eps);
  }
  if constexpr (requires { rule.weight_decay; }) set(rule.weight_decay, hyper.weight_decay);
  if constexpr (requires { rule.momentum; }) set(rule.momentum, hyper.momentum);
}

/// A policy whose buckets hold about as many bytes of fp32 gradients.
template <class Sharding>
[[nodiscard]] Sharding sharding_of(std::int64_t bucket_bytes) {
  if constexpr (std::is_same_v<Sharding, ScatterSharding>) {
    return {.grains = (std::max)(bucket_bytes / (so::grain_elements * 4), std::int64_t{1})};
  } else {
    return {.bucket_bytes = bucket_bytes};
  }
}

template <class Case>
[[nodiscard]] so::OptimizerConfig<typename Case::Rule, typename Case::Sharding> config_of(
    const Workload& workload) {
  auto groups = groups_of<typename Case::Rule>(workload.variant);
  for (auto& group : groups) override_with(workload.hyper, group.rule);
  return {.groups = std::move(groups),
          .sharding = sharding_of<typename Case::Sharding>(workload.bucket_bytes),
          .reduction = workload.reduction,
          .max_norm = workload.max_norm,
          .non_finite = workload.non_finite,
          .count_skipped_updates = workload.count_skipped};
}

using Fp32 = so::FullPrecision;
using Bf16 = so::Mixed<so::bf16, so::bf16, float>;
using Bf16Fp32 = so::Mixed<so::bf16, float, float>;
using Fp16 = so::Mixed<so::fp16, so::fp16, float>;
using Fp16Fp32 = so::Mixed<so::fp16, float, float>;

/// A case by number, on either side.
struct NamedCase {
  std::string_view name;
  ElementTypes types;
  Outcome (*on_host)(const Workload&);  ///< Threads<Host>
  Outcome (*on_nccl)(const Workload&);  ///< one GPU a rank
};

template <class Case>
[[nodiscard]] Outcome run_on_host(const Workload& workload);
template <class Case>
[[nodiscard]] Outcome run_on_nccl(const Workload& workload);
/// A world of one.
template <class Case>
[[nodiscard]] Outcome run_on_solo_cuda(const Workload& workload);

/// Threads<Cuda>: rank r on GPU `devices[r]`.
template <class Case>
[[nodiscard]] Outcome run_on_threads_cuda(const Workload& workload, const std::vector<int>& devices);

// clang-format off
#define SHARDOPT_TEST_CASES_FP32(X)                             \
  X(AdamW, so::AdamW, so::FlatSharding, Fp32)                   \
  X(Adam, so::Adam, so::PerParameterSharding, Fp32)             \
  X(SGD, so::SGD, so::Replicated, Fp32)                         \
  X(Sign, SignRule, ScatterSharding, Fp32)
#define SHARDOPT_TEST_CASES_BF16(X)                             \
  X(Adam, so::Adam, so::FlatSharding, Bf16)                     \
  X(SGD, so::SGD, so::PerParameterSharding, Bf16)               \
  X(Sign, SignRule, so::Replicated, Bf16)                       \
  X(AdamWAmsgrad, so::AdamWAmsgrad, ScatterSharding, Bf16)
#define SHARDOPT_TEST_CASES_BF16_FP32(X)                        \
  X(SGD, so::SGD, so::FlatSharding, Bf16Fp32)                   \
  X(Sign, SignRule, so::PerParameterSharding, Bf16Fp32)         \
  X(AdamWAmsgrad, so::AdamWAmsgrad, so::Replicated, Bf16Fp32)   \
  X(AdamW, so::AdamW, ScatterSharding, Bf16Fp32)
#define SHARDOPT_TEST_CASES_FP16(X)                             \
  X(Sign, SignRule, so::FlatSharding, Fp16)                     \
  X(AdamWAmsgrad, so::AdamWAmsgrad, so::PerParameterSharding, Fp16) \
  X(AdamW, so::AdamW, so::Replicated, Fp16)                     \
  X(Adam, so::Adam, ScatterSharding, Fp16)
#define SHARDOPT_TEST_CASES_FP16_FP32(X)                        \
  X(AdamWAmsgrad, so::AdamWAmsgrad, so::FlatSharding, Fp16Fp32) \
  X(AdamW, so::AdamW, so::PerParameterSharding, Fp16Fp32)       \
  X(Adam, so::Adam, so::Replicated, Fp16Fp32)                   \
  X(SGD, so::SGD, ScatterSharding, Fp16Fp32)
#define SHARDOPT_TEST_CASES(X)      \
  SHARDOPT_TEST_CASES_FP32(X)       \
  SHARDOPT_TEST_CASES_BF16(X)       \
  SHARDOPT_TEST_CASES_BF16_FP32(X)  \
  SHARDOPT_TEST_CASES_FP16(X)       \
  SHARDOPT_TEST_CASES_FP16_FP32(X)
// clang-format on

}  // namespace test
