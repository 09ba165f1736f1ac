// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/collective.hpp>
#include <shardopt/core/error.hpp>
#include <shardopt/core/math.hpp>
#include <shardopt/rules/rule.hpp>
#include <shardopt/sharding/sharding_policy.hpp>
#include <shardopt/zero/loss_scale.hpp>
#include <shardopt/zero/observer.hpp>
#include <shardopt/zero/step_state.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace shardopt::inline v0 {

/// What happens to the parameters that ranks bring to the start. Frozen parameters are included.
enum class InitialParameters : std::uint8_t {
  verify,     ///< must be the same bits on all ranks: CollectiveError otherwise
  broadcast,  ///< rank 0's replace the others'
  trust,      ///< as they stand
};

/// Parameters that share hyper-parameters: a whole rule value.
template <OptimizerRule Rule>
struct Group {
  /// Unique; parameters name it.
  std::string name;
  /// Its hyper-parameters.
  Rule rule = {};
};

/// How an optimizer works. The same on every rank, but for the observer.
template <OptimizerRule Rule, ShardingPolicy Sharding>
struct OptimizerConfig {
  std::vector<Group<Rule>> groups = {{"default", Rule{}}};  ///< every parameter's group must be here
  /// Who owns which elements, and the bucket size.
  Sharding sharding = {};
  /// How gradients of the ranks are added.
  Reduction reduction = Reduction::automatic;
  float max_norm =
      std::numeric_limits<float>::infinity();  ///< clips the gradient's global norm; 0 makes every gradient 0
  float clip_epsilon = 1e-6f;  ///< added to the norm in max_norm / (norm + epsilon), as PyTorch does
  /// What an infinite or NaN gradient does to a step.
  NonFinite non_finite = NonFinite::skip;
  std::optional<DynamicLossScale> loss_scale =
      {};  ///< for fp16; a step that is not finite is then skipped, whatever non_finite says
  bool count_skipped_updates = false;  ///< whether a skipped step counts for bias correction
  /// What is done about parameters that differ at the start.
  InitialParameters initial_parameters = InitialParameters::verify;
  Observer* observer = nullptr;  ///< must outlive the optimizer and its tickets

  /// @throws std::invalid_argument naming the field and what is legal
  void validate() const {
    const auto refuse = [](const std::string& what) {
      throw std::invalid_argument("shardopt: config." + what);
    };
    if (groups.empty()) refuse("groups is empty; every parameter belongs to one, by default to \"default\"");
    if (groups.size() > (std::numeric_limits<std::uint16_t>::max)())
      refuse("groups holds more than 65535 groups");
    for (std::size_t k = 0; k < groups.size(); ++k) {
      for (std::size_t j = 0; j < k; ++j) {
        if (groups[j].name == groups[k].name)
          refuse("groups names " + detail::in_quotes(groups[k].name) + " twice");
      }
      validate_rule(groups[k].rule, groups[k].name);
    }
    if (loss_scale) loss_scale->validate();
    if (!math::less_equal(0.0f, max_norm))  // by instructions: -Ofast folds comparisons that only NaN fails

      refuse("max_norm must be at least 0 (infinity: no clipping), got " + std::to_string(max_norm));
    if (!math::less_equal(0.0f, clip_epsilon) || !math::is_finite(clip_epsilon)) {
      refuse("clip_epsilon must be at least 0 and finite, got " + std::to_string(clip_epsilon));
    }
  }

  /// @throws std::invalid_argument naming the group
  static void validate_rule(const Rule& rule, const std::string& group) {
    if constexpr (requires { rule.validate(); }) {
      try {
        rule.validate();
      } catch (const std::invalid_argument& error) {
        throw std::invalid_argument(std::string(error.what()) + " (group " + detail::in_quotes(group) + ")");
      }
    }
  }
};

/// A scale of the gradient: a value, or device memory that holds it when the step runs.
class GradientScale {
 public:
  /// The value itself.
  constexpr GradientScale(float value) noexcept : value_(value) {}  // NOLINT: implicit
  /// Device memory, read when the step runs; not null.
  constexpr GradientScale(const float* pointer) noexcept  // NOLINT: implicit
      : pointer_(pointer), is_null_(pointer == nullptr) {}

  /// The value, if there is no pointer.
  [[nodiscard]] constexpr float value() const noexcept { return value_; }
  /// The pointer, or null.
  [[nodiscard]] constexpr const float* pointer() const noexcept { return pointer_; }
  /// Whether a null pointer was given.
  [[nodiscard]] constexpr bool is_null() const noexcept { return is_null_; }
  /// Whether it is the value 1, which changes nothing.
  [[nodiscard]] bool is_one() const noexcept {
    return pointer_ == nullptr && !is_null_ && math::equal(value_, 1.0f);
  }

 private:
  float value_ = 1.0f;
  const float* pointer_ = nullptr;
  bool is_null_ = false;
};

/// What may differ from step to step; the same on every rank.
struct StepOptions {
  float lr_factor = 1.0f;               ///< multiplies every group's learning rate
  GradientScale gradient_scale = 1.0f;  ///< the only divisor: the wire carries sums
  /// Device memory of scalars of the engine's (its loss), or null: their sums over ranks are exact, ride
  /// along in the step's small all-reduce and come back in StepResult::scalars.
  std::array<const float*, most_scalars> scalars = {};

  /// Whether any scalar is given.
  [[nodiscard]] bool has_scalars() const noexcept {
    return std::any_of(scalars.begin(), scalars.end(), [](const float* scalar) { return scalar != nullptr; });
  }

  /// @throws std::invalid_argument naming what is not finite, or null
  void validate() const {
    if (!math::is_finite(lr_factor)) throw std::invalid_argument("shardopt: lr_factor must be finite");
    if (gradient_scale.is_null()) {
      throw std::invalid_argument(
          "shardopt: gradient_scale is a null pointer; give a value, or device memory");
    }
    if (gradient_scale.pointer() == nullptr && !math::is_finite(gradient_scale.value())) {
      throw std::invalid_argument("shardopt: gradient_scale must be finite");
    }
  }
};

namespace detail {

[[nodiscard]] constexpr StepFactors factors_of(float lr_factor, GradientScale gradient_scale) noexcept {
  return {lr_factor, gradient_scale.value(), gradient_scale.pointer()};
}

}  // namespace detail

}  // namespace shardopt::inline v0
