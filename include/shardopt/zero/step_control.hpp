// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/digest.hpp>
#include <shardopt/core/exact_sum.hpp>
#include <shardopt/core/math.hpp>
#include <shardopt/rules/rule.hpp>
#include <shardopt/zero/step_state.hpp>

#include <cstdint>

// What the device decides about a step. Each functor runs by one thread: on the host at once, on a GPU in a
// stream.

namespace shardopt::inline v0::detail {

/// Before the first step.
struct InitializeStep {
  StepState* state;
  std::uint64_t rules_digest;
  DynamicLossScale loss_scale;
  bool scales_loss;

  SHARDOPT_HD void operator()() const {
    state->factors = StepFactors{};
    state->result = StepResult{};
    state->rules_digest = rules_digest;
    state->late_lr_factor = 1.0f;
    state->counters.loss_scale = scales_loss ? loss_scale.initial : 1.0f;
    state->counters.loss_scale_hysteresis = loss_scale.hysteresis;
    state->before = state->counters;
  }
};

/// What the next replays of a captured step work with.
struct SetFactors {
  StepState* state;
  StepFactors factors;

  SHARDOPT_HD void operator()() const { state->factors = factors; }
};

/// The gradient's scale, wherever it is.
[[nodiscard]] SHARDOPT_HD inline float gradient_scale_of(const StepFactors& factors) {
  return factors.device_gradient_scale != nullptr ? *factors.device_gradient_scale : factors.gradient_scale;
}

/// Before the all-reduce: adds this rank's digest and the engine's scalars.
struct OpenStep {
  StepState* state;
  StepInputs inputs;

  SHARDOPT_HD void operator()() const {
    const StepFactors factors = inputs.factors_on_device ? state->factors : inputs.factors;
    std::uint64_t digest = mix_bits(state->rules_digest ^ bits_of(factors.lr_factor));
    const float scale = gradient_scale_of(factors);
    digest = mix_bits(digest ^ bits_of(scale));
    digest = mix_bits(digest ^ bits_of(state->late_lr_factor));
    digest = mix_bits(digest ^ bits_of(state->counters.loss_scale));
    digest = mix_bits(digest ^ static_cast<std::uint64_t>(state->counters.updates)) & 0xffffffU;
    state->words[control_word::digest] = static_cast<std::int64_t>(digest);
    state->words[control_word::digest_squared] = static_cast<std::int64_t>(digest * digest);
    // Even if only one rank's is: all must skip the same steps.
    if (!math::is_finite(scale)) state->words[control_word::non_finite] += 1;
    for (int k = 0; k < most_scalars; ++k) {
      if (inputs.scalars[k] != nullptr)
        add_scalar(*inputs.scalars[k], state->words + control_word::scalars + k * control_word::scalar_words);
    }
  }

 private:
  static SHARDOPT_HD void add_scalar(float value, std::int64_t* words) {
    if (!math::is_finite(value)) {
      words[exact_sum::Floats::limbs] += 1;
      return;
    }
    const std::int64_t sign = math::less(value, 0.0f) ? -1 : 1;
    const exact_sum::Addend addend = exact_sum::Floats::split(math::widen(value));
    for (int part = 0; part < 3; ++part) {
      if (addend.parts[part] != 0)
        words[addend.first + part] += sign * static_cast<std::int64_t>(addend.parts[part]);
    }
  }
};

/// After the all-reduce: norm, clip factor and whether to go, the same on every rank; clears the sums for the
/// next step.
struct MeasureStep {
  StepState* state;
  StepInputs inputs;
  StepResult* slot;  ///< page-locked memory that the host reads once an event has passed, or null

  SHARDOPT_HD void operator()() const {
    StepState& s = *state;
    StepResult& r = s.result;
    const StepFactors factors = inputs.factors_on_device ? s.factors : inputs.factors;
    const double scale =
        math::div(math::widen(gradient_scale_of(factors)), math::widen(s.counters.loss_scale));
    r.non_finite = s.words[control_word::non_finite];
    r.inputs_differ = digests_differ(s.words);
    const double norm = math::mul(math::sqrt(exact_sum::Squares::to_double(s.words + control_word::squares)),
                                  math::abs(scale));
    const double clip = clip_factor(norm);
    const float factor = math::narrow(math::mul(scale, clip));
    // A factor beyond float would make infinities of gradients, and NaN of zeros. One above 1 may, unless the
    // norm fits a float; others leave finite what is finite.
    const bool stays_finite =
        !math::less(1.0f, math::abs(factor)) || math::is_finite(math::narrow(math::mul(norm, clip)));
    const bool finite = r.non_finite == 0 && math::is_finite(factor) && stays_finite;
    s.gradient_factor = finite ? factor : math::narrow(scale);
    r.norm = finite ? norm : not_a_number();
    r.clip_factor = finite ? math::narrow(clip) : 1.0f;
    r.loss_scale = s.counters.loss_scale;
    r.loss_scale_exhausted = false;
    r.skipped = !finite && (inputs.non_finite == NonFinite::skip || inputs.scales_loss);
    r.iteration = s.counters.iteration + 1;
    r.updates = s.counters.updates;
    for (int k = 0; k < most_scalars; ++k) {
      r.scalars[k] = scalar_sum(s.words + control_word::scalars + k * control_word::scalar_words);
    }
    for (int k = 0; k < control_word::count; ++k) s.words[k] = 0;
    if (slot != nullptr) *slot = r;
  }

 private:
  [[nodiscard]] static SHARDOPT_HD double not_a_number() {
    return double_from(std::uint64_t{0x7ff8000000000000U});
  }

  [[nodiscard]] static SHARDOPT_HD double scalar_sum(const std::int64_t* words) {
    return words[exact_sum::Floats::limbs] != 0 ? not_a_number() : exact_sum::Floats::to_double(words);
  }

  /// min(1, max_norm / (norm + epsilon)). 0/0 (no gradient, no limit) counts as 1.
  [[nodiscard]] SHARDOPT_HD double clip_factor(double norm) const {
    const double bound = math::add(norm, math::widen(inputs.clip_epsilon));
    const double limit = math::widen(inputs.max_norm);
    return math::less(limit, bound) ? math::div(limit, bound) : 1.0;
  }

  /// Equal digests have variance 0: world · Σd² = (Σd)².
  [[nodiscard]] SHARDOPT_HD bool digests_differ(const std::int64_t* words) const {
    const auto sum = static_cast<std::uint64_t>(words[control_word::digest]);
    const auto squares = static_cast<std::uint64_t>(words[control_word::digest_squared]);
    return squares * static_cast<std::uint64_t>(inputs.world) != sum * sum;
  }
};

/// Moves the loss scale after a step. @param overflow  whether its gradient was not finite
/// @return whether the scale would have to fall below its minimum
SHARDOPT_HD inline bool advance_loss_scale(StepCounters& counters, const DynamicLossScale& policy,
                                           bool overflow) {
  if (!overflow) {
    if (++counters.loss_scale_good_steps < policy.growth_interval) return false;
    const float grown = math::mul(counters.loss_scale, policy.growth_factor);
    if (math::is_finite(grown)) counters.loss_scale = grown;
    counters.loss_scale_good_steps = 0;
    counters.loss_scale_hysteresis = policy.hysteresis;
    return false;
  }
  counters.loss_scale_good_steps = 0;
  if (--counters.loss_scale_hysteresis > 0) return false;
  counters.loss_scale_hysteresis = 1;
  const bool exhausted = !math::less(policy.minimum, counters.loss_scale);
  counters.loss_scale = math::maximum(math::mul(counters.loss_scale, policy.backoff_factor), policy.minimum);
  return exhausted;
}

/// Then: counters and the loss scale move, and each group's constants are made for the update at hand.
template <OptimizerRule Rule>
struct DecideStep {
  StepState* state;
  StepInputs inputs;
  const Rule* rules;
  typename Rule::Constants* constants;
  int groups;
  StepResult* slot;

  SHARDOPT_HD void operator()() const {
    StepState& s = *state;
    StepResult& r = s.result;
    const StepFactors& factors = inputs.factors_on_device ? s.factors : inputs.factors;
    s.before = s.counters;
    s.late_lr_factor = inputs.late_lr ? factors.lr_factor : 1.0f;
    // A step that overflowed moves the scale, whether or not the engine discards it besides.
    if (inputs.scales_loss && (!inputs.discard || r.skipped)) {
      r.loss_scale_exhausted = advance_loss_scale(s.counters, inputs.loss_scale, r.skipped);
    }
    r.skipped = r.skipped || inputs.discard;
    s.counters.iteration += 1;
    if (!r.skipped || inputs.count_skipped) s.counters.updates += 1;
    r.iteration = s.counters.iteration;
    r.updates = s.counters.updates;
    s.verdict.go = r.skipped ? 0U : 1U;
    s.verdict.gradient_factor = s.gradient_factor;
    const StepScalars scalars{factors.lr_factor, static_cast<std::uint64_t>(s.counters.updates)};
    for (int g = 0; g < groups && !r.skipped; ++g) constants[g] = rules[g].constants(scalars);
    if (slot != nullptr) *slot = r;
  }
};

/// The last step's result into a ticket: for steps that were replayed.
struct ReadResult {
  const StepState* state;
  StepResult* slot;

  SHARDOPT_HD void operator()() const { *slot = state->result; }
};

/// Between steps: other counters.
struct AssignCounters {
  StepState* to;
  StepCounters counters;

  SHARDOPT_HD void operator()() const {
    to->counters = counters;
    to->before = counters;
  }
};

/// Between steps: other hyper-parameters for a group. Not a member of the optimizer: nvcc takes no private
/// type for a kernel.
template <OptimizerRule Rule>
struct AssignRule {
  Rule* to;
  Rule rule;
  StepState* state;
  std::uint64_t digest;  ///< over all groups, this one's new value included

  SHARDOPT_HD void operator()() const {
    *to = rule;
    state->rules_digest = digest;
  }
};

}  // namespace shardopt::inline v0::detail
