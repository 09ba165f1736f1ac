// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/exact_sum.hpp>
#include <shardopt/core/math.hpp>
#include <shardopt/devices/update.hpp>
#include <shardopt/rules/rule.hpp>
#include <shardopt/zero/step_result.hpp>

#include <cstdint>

namespace shardopt::inline v0 {

/// What a non-finite gradient does to a step.
enum class NonFinite : std::uint8_t {
  skip,       ///< all ranks skip the step: parameters, state and update count stay
  propagate,  ///< the update runs with what it finds; no clipping in that step; norm reads NaN
};

namespace detail {

/// The words of the one small all-reduce of a step: limbs of the squared norm, count of non-finite elements,
/// and two sums over a 24-bit digest of what must be equal on all ranks.
namespace control_word {
inline constexpr int squares = 0;
inline constexpr int non_finite = exact_sum::limbs;
inline constexpr int digest = non_finite + 1;
inline constexpr int digest_squared = digest + 1;
inline constexpr int count = digest_squared + 1;
}  // namespace control_word

/// What the host decides about a step, handed to the device by value.
struct StepInputs {
  float lr_factor = 1;
  float gradient_scale = 1;
  const float* device_gradient_scale = nullptr;  ///< device memory, or null: the value counts
  std::uint32_t digest = 0;                      ///< 24 bits over what must be equal on all ranks
  float max_norm = 0;
  float clip_epsilon = 0;
  int world = 1;
  NonFinite non_finite = NonFinite::skip;
  bool count_skipped = false;
  bool discard = false;  ///< the engine decided to skip
};

/// The device's memory of a step: counters, sums, verdict.
struct StepState {
  StepVerdict verdict;
  std::int64_t iteration;
  std::int64_t updates;
  std::int64_t words[control_word::count];
  StepResult result;
  float gradient_scale;
};

/// Before the all-reduce: adds this rank's digest.
struct OpenStep {
  StepState* state;
  StepInputs inputs;

  SHARDOPT_HD void operator()() const {
    state->words[control_word::digest] = inputs.digest;
    state->words[control_word::digest_squared] =
        static_cast<std::int64_t>(static_cast<std::uint64_t>(inputs.digest) * inputs.digest);
  }
};

/// After the all-reduce: norm, clip factor and whether to go, the same on every rank; clears the sums for the
/// next step.
struct MeasureStep {
  StepState* state;
  StepInputs inputs;
  StepResult* slot;  ///< page-locked memory that the host reads once an event has passed

  SHARDOPT_HD void operator()() const {
    StepState& s = *state;
    StepResult& r = s.result;
    s.gradient_scale =
        inputs.device_gradient_scale != nullptr ? *inputs.device_gradient_scale : inputs.gradient_scale;
    r.non_finite = s.words[control_word::non_finite];
    r.inputs_differ = digests_differ(s.words);
    const bool finite = r.non_finite == 0 && math::is_finite(s.gradient_scale);
    const double scale = math::abs(static_cast<double>(s.gradient_scale));
    const double norm = math::mul(math::sqrt(exact_sum::to_double(s.words + control_word::squares)), scale);
    r.norm = finite ? norm : __builtin_nan("");
    r.clip_factor = finite ? clip_factor(norm) : 1.0f;
    r.skipped = !finite && inputs.non_finite == NonFinite::skip;
    r.iteration = s.iteration + 1;
    r.updates = s.updates;
    for (int k = 0; k < control_word::count; ++k) s.words[k] = 0;
    *slot = r;
  }

 private:
  /// min(1, max_norm / (norm + epsilon)) in double, rounded once. 0/0 (no gradient, no limit) counts as 0.
  [[nodiscard]] SHARDOPT_HD float clip_factor(double norm) const {
    const double bound = math::add(norm, static_cast<double>(inputs.clip_epsilon));
    const double limit = static_cast<double>(inputs.max_norm);
    if (!(limit < bound)) return 1.0f;
    return static_cast<float>(math::div(limit, bound));
  }

  /// Equal digests have variance 0: world · Σd² = (Σd)².
  [[nodiscard]] SHARDOPT_HD bool digests_differ(const std::int64_t* words) const {
    const auto sum = static_cast<std::uint64_t>(words[control_word::digest]);
    const auto squares = static_cast<std::uint64_t>(words[control_word::digest_squared]);
    return squares * static_cast<std::uint64_t>(inputs.world) != sum * sum;
  }
};

/// Then: counters move, and each group's constants are made for the update at hand.
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
    r.skipped = r.skipped || inputs.discard;
    s.iteration += 1;
    if (!r.skipped || inputs.count_skipped) s.updates += 1;
    r.iteration = s.iteration;
    r.updates = s.updates;
    s.verdict.go = r.skipped ? 0U : 1U;
    s.verdict.gradient_factor = static_cast<float>(
        math::mul(static_cast<double>(s.gradient_scale), static_cast<double>(r.clip_factor)));
    const StepScalars scalars{inputs.lr_factor, static_cast<std::uint64_t>(s.updates)};
    for (int g = 0; g < groups && !r.skipped; ++g) constants[g] = rules[g].constants(scalars);
    *slot = r;
  }
};

}  // namespace detail
}  // namespace shardopt::inline v0
