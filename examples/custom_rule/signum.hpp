// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/shardopt.hpp>

/// A rule of the user's own: momentum, then a step of fixed size against its sign (Bernstein et al. 2018,
/// "signSGD").
struct Signum {
  float lr = 1e-3F;
  float beta = 0.9F;
  template <class V>
  struct State {
    V momentum;
  };
  struct Constants {
    float lr, beta;
  };
  SHARDOPT_HD Constants constants(shardopt::StepScalars s) const {
    return {shardopt::math::mul(lr, s.lr_factor), beta};
  }
  template <class V>
  SHARDOPT_RULE static V update(Constants c, V param, V grad, State<V>& s) {
    namespace math = shardopt::math;
    s.momentum = math::fma(c.beta, math::sub(s.momentum, grad), grad);
    return math::sub(param, math::select(math::less(s.momentum, V(0.0F)), V(-c.lr), V(c.lr)));
  }
};

static_assert(shardopt::OptimizerRule<Signum>);
