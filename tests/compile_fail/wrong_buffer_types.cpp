// SPDX-License-Identifier: Apache-2.0
// expect: the buffers' element types are not those of the precision policy
#include <shardopt/shardopt.hpp>

namespace so = shardopt;

void wrong(so::ParameterTable& table, float* parameters, float* gradients) {
  using Optimizer =
      so::ZeroOptimizer<so::AdamW, so::FlatSharding, so::Solo<so::Host>, so::Mixed<so::bf16, float, float>>;
  Optimizer optimizer(table, {}, so::Solo<so::Host>{}, so::FlatBuffers<float, float>{parameters, gradients},
                      so::Host::Stream{});
}
