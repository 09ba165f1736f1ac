// SPDX-License-Identifier: Apache-2.0
// expect: a rule and its Constants may be aligned to 256 bytes at most
#include <shardopt/shardopt.hpp>

namespace so = shardopt;

struct FarApart {
  double lr = 1;
  template <class V>
  struct State {};
  struct alignas(512) Constants {
    float lr;
  };
  SHARDOPT_HD Constants constants(so::StepScalars) const { return {1.0f}; }
  template <class V>
  SHARDOPT_RULE static V update(Constants, V param, V, State<V>&) {
    return param;
  }
};

using Optimizer = so::ZeroOptimizer<FarApart, so::FlatSharding, so::Threads<so::Host>, so::FullPrecision>;

Optimizer::Stream wrong(Optimizer& optimizer) {
  optimizer.zero_gradients({});
  return {};
}
