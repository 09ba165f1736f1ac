// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/config.hpp>
#include <shardopt/core/math.hpp>
#include <shardopt/rules/hyper_parameters.hpp>
#include <shardopt/rules/rule.hpp>

#include <array>
#include <string_view>
#include <type_traits>

namespace shardopt::inline v0 {

/// How weight decay enters an Adam.
enum class WeightDecay : bool {
  l2,         ///< weight_decay · parameter is added to the gradient, so the moments see it (Adam)
  decoupled,  ///< the parameter shrinks by lr · weight_decay before the update; the moments do not see it
              ///< (AdamW)
};

/// The family of Adam, AdamW and their AMSGrad forms: see the headers of these names for what they compute.
///
/// Hyper-parameters are doubles, and so are the powers of the betas and all that is made of them once a step;
/// what the elements share is then rounded to float. An element's arithmetic is fp32, in this order (rounded
/// once at each step):
///
///     g = ±grad;  L2: g = weight_decay·p + g;  decoupled: p = p − lr·weight_decay·p
///     m = (m − (1−β₁)·m) + (1−β₁)·g;  v = (v − (1−β₂)·v) + ((1−β₂)·g)·g;  AMSGrad: v̂ = max(v̂, v), else v̂ = v
///     p = p − lr/(1−β₁ᵗ) · (m / (√v̂ · 1/√(1−β₂ᵗ) + ε))
///
/// with the decays written so that a moment's two weights sum to 1 exactly even for a β that float cannot
/// tell from 1.
template <WeightDecay style, bool amsgrad>
struct BasicAdam {
  double lr = 1e-3;      ///< learning rate, ≥ 0
  double beta1 = 0.9;    ///< decay of the gradient's mean, in [0, 1)
  double beta2 = 0.999;  ///< decay of the square's mean, in [0, 1)
  double eps = 1e-8;     ///< added to the root, ≥ 0
  double weight_decay = style == WeightDecay::decoupled ? 1e-2 : 0.0;  ///< ≥ 0
  bool maximize = false;                                               ///< climb instead of descend

  /// As it stands in messages and checkpoints.
  static constexpr std::string_view name = style == WeightDecay::decoupled
                                               ? (amsgrad ? "adamw_amsgrad" : "adamw")
                                               : (amsgrad ? "adam_amsgrad" : "adam");

  /// The two moments of an element.
  template <class V>
  struct Moments {
    /// Mean of the gradient.
    V exp_avg;
    /// Mean of the gradient's square.
    V exp_avg_sq;
  };
  /// The same with the largest second moment so far.
  template <class V>
  struct MomentsWithMaximum {
    /// Mean of the gradient.
    V exp_avg;
    /// Mean of the gradient's square.
    V exp_avg_sq;
    /// Largest second moment so far.
    V max_exp_avg_sq;
  };
  /// State of one element.
  template <class V>
  using State = std::conditional_t<amsgrad, MomentsWithMaximum<V>, Moments<V>>;

  /// Names of the state buffers, in order.
  static constexpr auto state_names = [] {
    if constexpr (amsgrad) {
      return std::array<std::string_view, 3>{"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
    } else {
      return std::array<std::string_view, 2>{"exp_avg", "exp_avg_sq"};
    }
  }();

  /// What all elements of a step share.
  struct Constants {
    float gradient_sign;       ///< −1 to climb
    float decay;               ///< l2: weight_decay; decoupled: −lr·weight_decay
    float weight1;             ///< 1 − β₁
    float weight2;             ///< 1 − β₂
    float root_factor;         ///< 1/√(1−β₂ᵗ)
    float eps;                 ///< ε
    float negative_step_size;  ///< −lr/(1−β₁ᵗ)
  };

  /// What the elements of a step share. @see OptimizerRule
  [[nodiscard]] SHARDOPT_HD Constants constants(StepScalars scalars) const noexcept {
    const double rate = math::mul(lr, math::widen(scalars.lr_factor));
    const double correction1 = math::sub(1.0, math::pow(beta1, scalars.update));
    const double correction2 = math::sub(1.0, math::pow(beta2, scalars.update));
    const double shrink =
        style == WeightDecay::decoupled ? math::sub(0.0, math::mul(rate, weight_decay)) : weight_decay;
    return {.gradient_sign = maximize ? -1.0f : 1.0f,
            .decay = math::narrow(shrink),
            .weight1 = math::narrow(math::sub(1.0, beta1)),
            .weight2 = math::narrow(math::sub(1.0, beta2)),
            .root_factor = math::narrow(math::div(1.0, math::sqrt(correction2))),
            .eps = math::narrow(eps),
            .negative_step_size = math::narrow(math::sub(0.0, math::div(rate, correction1)))};
  }

  /// The new parameter. @see OptimizerRule
  template <class V>
  [[nodiscard]] SHARDOPT_RULE static V update(Constants c, V param, V grad, State<V>& state) noexcept {
    V g = math::mul(c.gradient_sign, grad);
    if constexpr (style == WeightDecay::l2) {
      g = math::fma(c.decay, param, g);
    } else {
      param = math::fma(c.decay, param, param);
    }
    state.exp_avg = math::fma(c.weight1, g, math::fma(math::neg(c.weight1), state.exp_avg, state.exp_avg));
    state.exp_avg_sq = math::fma(math::mul(c.weight2, g), g,
                                 math::fma(math::neg(c.weight2), state.exp_avg_sq, state.exp_avg_sq));
    V square = state.exp_avg_sq;
    if constexpr (amsgrad) {
      state.max_exp_avg_sq = math::maximum(state.max_exp_avg_sq, state.exp_avg_sq);
      square = state.max_exp_avg_sq;
    }
    const V denominator = math::fma(math::sqrt(square), c.root_factor, c.eps);
    return math::fma(c.negative_step_size, math::div(state.exp_avg, denominator), param);
  }

  /// @throws std::invalid_argument  if a hyper-parameter is out of its range
  void validate() const {
    detail::require_not_negative(name, "lr", lr);
    detail::require_fraction(name, "beta1", beta1);
    detail::require_fraction(name, "beta2", beta2);
    detail::require_not_negative(name, "eps", eps);
    detail::require_not_negative(name, "weight_decay", weight_decay);
  }
};

}  // namespace shardopt::inline v0
