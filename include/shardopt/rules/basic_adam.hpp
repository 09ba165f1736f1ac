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
/// what the elements share is then rounded to float. An element's arithmetic is fp32, each line rounding its
/// products and sums once (a sum of a product as one fused operation):
///
///     g = ±grad;  L2: g = weight_decay·p + g;  decoupled: p = p − lr·weight_decay·p
///     m = m + (1−β₁)·(g − m);  v = v + (1−β₂)·(g² − v);  AMSGrad: v̂ = max(v̂, v), else v̂ = v
///     p = p − lr/(1−β₁ᵗ) · (m / (√v̂ · 1/√(1−β₂ᵗ) + ε))
///
/// The moments are written so that only 1−β enters, which float can hold where it cannot tell β from 1, and
/// so that they are rounded once on their own scale; where β < 1/2 they are m = g + β·(m − g) instead, exact
/// for β = 0. g² stops at the largest float, so that a gradient beyond 1.8e19 spoils no moment.
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

  /// Names of the hyper-parameters, in order.
  static constexpr std::array<std::string_view, 6> hyper_parameter_names{"lr",  "beta1",        "beta2",
                                                                         "eps", "weight_decay", "maximize"};

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

  /// How a moment takes in what is new: one of the two, moved by a weight of at most 1/2 towards the other.
  struct Blend {
    float weight;     ///< 1 − β, or β if it is smaller
    bool starts_new;  ///< whether it is the new one that is moved
  };

  /// What all elements of a step share.
  struct Constants {
    float gradient_sign;       ///< −1 to climb
    float decay;               ///< l2: weight_decay; decoupled: −lr·weight_decay
    Blend mean;                ///< how exp_avg takes in a gradient
    Blend mean_square;         ///< how exp_avg_sq takes in its square
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
            .decay = detail::narrow_finite(shrink),
            .mean = blend(beta1),
            .mean_square = blend(beta2),
            .root_factor = math::narrow(math::div(1.0, math::sqrt(correction2))),
            .eps = math::narrow(eps),
            .negative_step_size = detail::narrow_finite(math::sub(0.0, math::div(rate, correction1)))};
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
    const V g_squared = math::minimum(math::mul(g, g), V(0x1.fffffep127f));
    state.exp_avg = blended(c.mean, state.exp_avg, g);
    state.exp_avg_sq = blended(c.mean_square, state.exp_avg_sq, g_squared);
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

  /// The constants of a moment that decays by beta.
  [[nodiscard]] SHARDOPT_HD static Blend blend(double beta) noexcept {
    const bool starts_new = math::less(beta, 0.5);
    return {.weight = math::narrow(starts_new ? beta : math::sub(1.0, beta)), .starts_new = starts_new};
  }

  /// A moment after it has taken in what is new.
  template <class V>
  [[nodiscard]] SHARDOPT_RULE static V blended(Blend blend, V moment, V fresh) noexcept {
    const V base = math::select(blend.starts_new, fresh, moment);
    const V other = math::select(blend.starts_new, moment, fresh);
    return math::fma(blend.weight, math::sub(other, base), base);
  }
};

}  // namespace shardopt::inline v0
