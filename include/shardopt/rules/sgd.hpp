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
///     b = g where there is no b yet, then b = momentum·b + (1−dampening)·g
///     p = p − lr · (nesterov ? g + momentum·b : b)
///
/// lr is the hyper-parameter times the step's lr_factor. One float of state an element: "momentum_buffer"
/// (b). There is no b yet where the buffer is +0, as states are before the first update; a b that has become
/// zero is kept as −0. So an element's first b is its gradient whenever it comes: after skipped steps, where
/// momentum is switched on later, and adopted buffers go on as they stand. With momentum 0 the step takes g,
/// dampening has no effect, and the buffer stays as it is; where no group has momentum, none is kept.
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
    float momentum;       ///< what is kept of the momentum buffer, also in Nesterov's step
    float taken;          ///< what is taken of the gradient, but for the first
    float negative_lr;    ///< −lr
    bool keeps;           ///< whether there is momentum
    bool nesterov;        ///< whether the step looks ahead
  };

  /// What the elements of a step share. @see OptimizerRule
  [[nodiscard]] SHARDOPT_HD Constants constants(StepScalars scalars) const noexcept {
    return {
        .gradient_sign = maximize ? -1.0f : 1.0f,
        .weight_decay = math::narrow(weight_decay),
        .momentum = math::narrow(momentum),
        .taken = math::narrow(math::sub(1.0, dampening)),
        .negative_lr = detail::narrow_finite(math::sub(0.0, math::mul(lr, math::widen(scalars.lr_factor)))),
        .keeps = !stateless(),
        .nesterov = nesterov};
  }

  /// The new parameter. @see OptimizerRule
  template <class V>
  [[nodiscard]] SHARDOPT_RULE static V update(Constants c, V param, V grad, State<V>& state) noexcept {
    const V g = math::fma(c.weight_decay, param, math::mul(c.gradient_sign, grad));
    const V before = state.momentum_buffer;
    const V first = math::select(math::less(V(0.0f), math::copysign(V(1.0f), before)), V(1.0f), V(c.taken));
    const V taken = math::select(math::equal(before, V(0.0f)), first, V(c.taken));
    const V moved = math::fma(c.momentum, before, math::mul(taken, g));
    const V buffer = math::select(math::equal(moved, V(0.0f)), math::neg(V(0.0f)), moved);
    state.momentum_buffer = math::select(c.keeps, buffer, before);
    const V direction = math::select(c.nesterov, math::fma(c.momentum, buffer, g), buffer);
    return math::fma(c.negative_lr, math::select(c.keeps, direction, g), param);
  }

  /// Whether no momentum is kept.
  [[nodiscard]] SHARDOPT_HD bool stateless() const noexcept { return math::equal(momentum, 0.0); }

  /// @throws std::invalid_argument  if a hyper-parameter is out of its range
  /// @throws std::invalid_argument  for Nesterov's form without momentum or with dampening
  void validate() const {
    detail::require_not_negative(name, "lr", lr);
    detail::require_not_negative(name, "momentum", momentum);
    detail::require_not_negative(name, "weight_decay", weight_decay);
    if (!detail::is_finite_float(dampening))
      detail::refuse_hyper_parameter(name, "dampening", dampening, "finite, as a float too");
    if (nesterov && (stateless() || !math::equal(dampening, 0.0))) {
      throw std::invalid_argument("shardopt: sgd: nesterov needs momentum > 0 and dampening 0");
    }
  }
};

static_assert(OptimizerRule<SGD>);

}  // namespace shardopt::inline v0
