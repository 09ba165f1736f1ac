// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/rules/adam.hpp>
#include <shardopt/rules/adamw.hpp>
#include <shardopt/rules/sgd.hpp>
#include <support/foreign_policies.hpp>

#include <cmath>
#include <cstdint>
#include <limits>

/// The rules again, as plain loops' bodies: once with floats and the roundings that the rules promise, once
/// with doubles by the definition.
namespace test {

template <class Rule>
struct PlainRule;

template <so::WeightDecay style, bool amsgrad>
struct PlainRule<so::BasicAdam<style, amsgrad>> {
  using Rule = so::BasicAdam<style, amsgrad>;

  static float update(const Rule& rule, double lr_factor, std::int64_t t, float param, float grad,
                      float* state) {
    const double rate = rule.lr * lr_factor;
    const auto root_factor =
        static_cast<float>(1 / std::sqrt(1 - std::pow(rule.beta2, static_cast<double>(t))));
    const auto step = static_cast<float>(-(rate / (1 - std::pow(rule.beta1, static_cast<double>(t)))));
    float g = rule.maximize ? -grad : grad;
    if (style == so::WeightDecay::l2) {
      g = std::fma(static_cast<float>(rule.weight_decay), param, g);
    } else {
      param = std::fma(static_cast<float>(-(rate * rule.weight_decay)), param, param);
    }
    state[0] = blended(state[0], g, rule.beta1);
    state[1] = blended(state[1], std::fmin(g * g, std::numeric_limits<float>::max()), rule.beta2);
    float square = state[1];
    if constexpr (amsgrad) {
      if (state[2] < square) state[2] = square;
      square = state[2];
    }
    const float quotient = state[0] / std::fma(std::sqrt(square), root_factor, static_cast<float>(rule.eps));
    return std::fma(step, quotient, param);
  }

  /// A mean that decays by beta, after it has taken in a value.
  static float blended(float mean, float value, double beta) {
    if (beta < 0.5) return std::fma(static_cast<float>(beta), mean - value, value);
    return std::fma(static_cast<float>(1 - beta), value - mean, mean);
  }

  static double update(const Rule& rule, double lr_factor, std::int64_t t, double param, double grad,
                       double* state) {
    const double lr = rule.lr * lr_factor;
    double g = rule.maximize ? -grad : grad;
    if (style == so::WeightDecay::l2) g += rule.weight_decay * param;
    if (style == so::WeightDecay::decoupled) param -= lr * rule.weight_decay * param;
    state[0] = rule.beta1 * state[0] + (1 - rule.beta1) * g;
    state[1] = rule.beta2 * state[1] + (1 - rule.beta2) * g * g;
    double square = state[1];
    if constexpr (amsgrad) square = state[2] = std::fmax(state[2], square);
    const double mean = state[0] / (1 - std::pow(rule.beta1, static_cast<double>(t)));
    const double root = std::sqrt(square / (1 - std::pow(rule.beta2, static_cast<double>(t))));
    return param - lr * mean / (root + rule.eps);
  }
};

template <>
struct PlainRule<so::SGD> {
  static float update(const so::SGD& rule, double lr_factor, std::int64_t, float param, float grad,
                      float* state) {
    const auto momentum = static_cast<float>(rule.momentum);
    const auto negative_lr = static_cast<float>(-(rule.lr * lr_factor));
    const float g = std::fma(static_cast<float>(rule.weight_decay), param, rule.maximize ? -grad : grad);
    if (rule.momentum == 0) return std::fma(negative_lr, g, param);
    const float taken = (is_unset(state[0]) ? 1.0f : static_cast<float>(1 - rule.dampening)) * g;
    state[0] = std::fma(momentum, state[0], taken);
    if (state[0] == 0) state[0] = -0.0f;
    const float direction = rule.nesterov ? std::fma(momentum, state[0], g) : state[0];
    return std::fma(negative_lr, direction, param);
  }

  static double update(const so::SGD& rule, double lr_factor, std::int64_t, double param, double grad,
                       double* state) {
    const double g = (rule.maximize ? -grad : grad) + rule.weight_decay * param;
    if (rule.momentum == 0) return param - rule.lr * lr_factor * g;
    state[0] = is_unset(state[0]) ? g : rule.momentum * state[0] + (1 - rule.dampening) * g;
    if (state[0] == 0) state[0] = -0.0;
    return param - rule.lr * lr_factor * (rule.nesterov ? g + rule.momentum * state[0] : state[0]);
  }

  /// +0: no buffer yet.
  template <class Number>
  static bool is_unset(Number buffer) {
    return buffer == 0 && !std::signbit(buffer);
  }
};

template <>
struct PlainRule<SignRule> {
  template <class Number>
  static Number update(const SignRule& rule, double lr_factor, std::int64_t, Number param, Number grad,
                       Number* state) {
    const Number taken = static_cast<Number>(1.0f - rule.decay) * grad;
    state[0] = std::fma(static_cast<Number>(rule.decay), state[0], taken);
    state[1] += 1;
    const auto lr = static_cast<Number>(rule.lr * static_cast<float>(lr_factor));
    const Number sign = state[0] == 0 ? Number(0) : state[0] < 0 ? Number(-1) : Number(1);
    return std::fma(-lr, sign, param);
  }
};

}  // namespace test
