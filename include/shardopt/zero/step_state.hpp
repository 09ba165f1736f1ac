// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/exact_sum.hpp>
#include <shardopt/devices/update.hpp>
#include <shardopt/zero/loss_scale.hpp>
#include <shardopt/zero/step_result.hpp>

#include <cstdint>

namespace shardopt::inline v0 {

/// What a non-finite gradient does to a step.
enum class NonFinite : std::uint8_t {
  skip,       ///< all ranks skip the step: parameters, state and update count stay
  propagate,  ///< the update runs with what it finds; no clipping in that step; norm reads NaN
};

namespace detail {

/// The words of the one small all-reduce of a step.
namespace control_word {
inline constexpr int squares = 0;                             ///< limbs of the squared norm
inline constexpr int non_finite = exact_sum::Squares::limbs;  ///< count of non-finite elements
inline constexpr int digest = non_finite + 1;  ///< Σd over a 24-bit digest of what must be equal on all ranks
inline constexpr int digest_squared = digest + 1;  ///< Σd²
inline constexpr int scalars =
    digest_squared + 1;  ///< for each scalar: limbs, then a count of non-finite ones
inline constexpr int scalar_words = exact_sum::Floats::limbs + 1;
inline constexpr int count = scalars + most_scalars * scalar_words;
}  // namespace control_word

/// What changes from step to step and may come from device memory.
struct StepFactors {
  float lr_factor = 1;
  float gradient_scale = 1;
  const float* device_gradient_scale = nullptr;  ///< device memory, or null: the value counts
};

/// What the host decides about a step, handed to the device by value.
struct StepInputs {
  StepFactors factors = {};
  bool factors_on_device =
      false;  ///< they are StepState's (set_inputs), not these: the step is being captured
  const float* scalars[most_scalars] = {};  ///< the engine's, device memory, or null
  float max_norm = 0;
  float clip_epsilon = 0;
  int world = 1;
  NonFinite non_finite = NonFinite::skip;
  bool count_skipped = false;
  bool discard = false;  ///< the engine decided to skip
  bool late_lr = false;  ///< factors.lr_factor comes when its all-reduce has gone: the next one compares it
  bool scales_loss = false;
  DynamicLossScale loss_scale = {};

  /// Whether the all-reduce needs device memory that the engine writes.
  [[nodiscard]] bool reads_engine_memory() const noexcept {
    bool reads = factors.device_gradient_scale != nullptr;
    for (const float* scalar : scalars) reads = reads || scalar != nullptr;
    return reads;
  }
};

}  // namespace detail

/// What an optimizer counts from step to step: on the device, saved with its state.
struct StepCounters {
  std::int64_t iteration = 0;              ///< steps taken; drives schedules
  std::int64_t updates = 0;                ///< steps applied; drives bias correction
  float loss_scale = 1.0f;                 ///< of the next step
  std::int32_t loss_scale_hysteresis = 0;  ///< skipped steps left before it falls
  std::int64_t loss_scale_good_steps = 0;  ///< applied steps in a row since it moved
};

namespace detail {

/// The device's memory of a step: counters, sums, verdict.
struct StepState {
  StepVerdict verdict;
  StepCounters counters;
  StepCounters before;  ///< the last decision: what holds if its update was never enqueued
  std::int64_t words[control_word::count];
  StepResult result;
  StepFactors factors;
  float gradient_factor;  ///< what this step's gradient is multiplied by: scales and clipping, rounded once
  std::uint64_t rules_digest;  ///< over all groups' hyper-parameters, as replays find them
  float late_lr_factor;        ///< of the last step, where no all-reduce has compared it yet; else 1
};

}  // namespace detail
}  // namespace shardopt::inline v0
