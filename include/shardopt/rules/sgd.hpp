// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/config.hpp>
#include <shardopt/core/math.hpp>
#include <shardopt/rules/hyper_parameters.hpp>
#include <shardopt/rules/rule.hpp>

#include <array>
#include <stdexcept>
#include <string>
#include <string_view>

namespace shardopt::inline v0 {

/// Stochastic gradient descent with momentum, as torch.optim.SGD defines it; Nesterov's form after Sutskever,
/// Martens, Dahl, Hinton: "On the importance of initialization and momentum in deep learning", 2013.
///
///     g = grad + weight_decay·p                       (grad negated first to maximize)
///     b = g in the first update, then b = momentum·b + (1−dampening)·g
///     p = p − lr · (nesterov ? g + momentum·b : b)
///
/// lr is the hyper-parameter times the step's lr_factor. One float of state an element: "momentum_buffer"
/// (b); with momentum 0 none is kept, b is g and dampening has no effect.
struct SGD {
  double lr = 1e-3;           ///< learning rate, ≥ 0
  double momentum = 0.0;      ///< ≥ 0
  double dampening = 0.0;     ///< finite
  double weight_decay = 0.0;  ///< L2 penalty, ≥ 0
  bool nesterov = false;      ///< needs momentum > 0 and dampening 0
  bool maximize = false;      ///< climb instead of descend

  /// As it stands in messages and checkpoints.
  static constexpr std::string_view name = "sgd";

  /// Names of the hyper-parameters, in order.
  static constexpr std::array<std::string_view, 6> hyper_parameter_names{
      "lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"};

  /// State of one element.
  template <class V>
  struct State {
    /// Running sum of gradients.
    V momentum_buffer;
  };
  /// Name of the state buffer.
  static constexpr std::array<std::string_view, 1> state_names{"momentum_buffer"};

  /// What all elements of a step share.
  struct Constants {
    float gradient_sign;  ///< −1 to climb
    float weight_decay;   ///< the L2 penalty
    float kept;           ///< what is kept of the momentum buffer: nothing in the first update
    float taken;          ///< what is taken of the gradient: all of it in the first update
    float momentum;       ///< for Nesterov's step
    float negative_lr;    ///< −lr
    bool nesterov;        ///< whether the step looks ahead
  };

  /// What the elements of a step share. @see OptimizerRule
  [[nodiscard]] SHARDOPT_HD Constants constants(StepScalars scalars) const noexcept {
    const bool starts = scalars.update <= 1 || stateless();
    const float beta = math::narrow(momentum);
    return {.gradient_sign = maximize ? -1.0f : 1.0f,
            .weight_decay = math::narrow(weight_decay),
            .kept = starts ? 0.0f : beta,
            .taken = starts ? 1.0f : math::narrow(math::sub(1.0, dampening)),
            .momentum = beta,
            .negative_lr = math::narrow(math::sub(0.0, math::mul(lr, math::widen(scalars.lr_factor)))),
            .nesterov = nesterov};
  }

  /// The new parameter. @see OptimizerRule
  template <class V>
  [[nodiscard]] SHARDOPT_RULE static V update(Constants c, V param, V grad, State<V>& state) noexcept {
    const V g = math::fma(c.weight_decay, param, math::mul(c.gradient_sign, grad));
    state.momentum_buffer = math::fma(c.kept, state.momentum_buffer, math::mul(c.taken, g));
    const V ahead = math::fma(c.momentum, state.momentum_buffer, g);
    return math::fma(c.negative_lr, math::select(c.nesterov, ahead, state.momentum_buffer), param);
  }

  /// Whether no momentum is kept.
  [[nodiscard]] SHARDOPT_HD bool stateless() const noexcept { return math::equal(momentum, 0.0); }

  /// @throws std::invalid_argument  if a hyper-parameter is out of its range
  /// @throws std::invalid_argument  for Nesterov's form without momentum or with dampening
  void validate() const {
    detail::require_not_negative(name, "lr", lr);
    detail::require_not_negative(name, "momentum", momentum);
    detail::require_not_negative(name, "weight_decay", weight_decay);
    if (!math::is_finite(dampening)) detail::refuse_hyper_parameter(name, "dampening", dampening, "finite");
    if (nesterov && (stateless() || !math::equal(dampening, 0.0))) {
      throw std::invalid_argument("shardopt: sgd: nesterov needs momentum > 0 and dampening 0");
    }
  }
};

static_assert(OptimizerRule<SGD>);

}  // namespace shardopt::inline v0
