// SPDX-License-Identifier: Apache-2.0
/// A rule of the user's own, sharded over three threads.
#include "problem.hpp"
#include "signum.hpp"

#include <shardopt/shardopt.hpp>

#include <utility>
#include <vector>

namespace so = shardopt;

int main() {
  constexpr int ranks = 3;
  std::vector<float> result;
  so::Threads<so::Host>::run(ranks, [&](so::Threads<so::Host> comm) {
    const int rank = comm.rank();
    std::vector<float> parameters(elements, 0.0F);
    std::vector<float> gradients(elements, 0.0F);
    const so::ParameterTable table = parameter_table();
    const so::ParameterId weight{0};
    const so::Host::Stream stream{};
    using Optimizer = so::ZeroOptimizer<Signum, so::FlatSharding, so::Threads<so::Host>, so::FullPrecision>;
    Optimizer optimizer(table, {.groups = {{"default", {.lr = 0.125F, .beta = 0.5F}}}}, std::move(comm),
                        so::FlatBuffers{parameters.data(), gradients.data()}, stream);
    for (int step = 0; step < steps; ++step) {
      optimizer.wait_parameters(stream);
      for (std::size_t n = 0; n < gradients.size(); ++n) {  // rank 0 alone has samples; the wire carries sums
        gradients[n] = rank == 0 ? 2 * (parameters[n] - (static_cast<float>(n % 7) - 3.0F)) : 0.0F;
      }
      optimizer.gradient_ready(weight, stream);
      (void)optimizer.step({}, stream);
    }
    optimizer.wait_parameters(stream);
    if (rank == 0) result = parameters;
  });
  return judge(result, ranks);
}
