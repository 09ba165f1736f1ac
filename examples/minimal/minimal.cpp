// SPDX-License-Identifier: Apache-2.0
/// An engine's two flat buffers and a sharded optimizer, four ranks as threads: ten steps towards the minimum
/// of (w - 3)² + (b + 1)².
#include <shardopt/shardopt.hpp>

#include <cmath>
#include <cstddef>
#include <cstdio>
#include <utility>
#include <vector>

namespace so = shardopt;

int main() {
  constexpr int ranks = 4;
  std::vector<float> result;
  so::Threads<so::Host>::run(ranks, [&](so::Threads<so::Host> comm) {
    const int rank = comm.rank();
    std::vector<float> parameters(1000, 0.0F);  // the engine's: a 30 × 33 matrix and a bias of 10
    std::vector<float> gradients(1000, 0.0F);
    so::ParameterTable table;
    const so::ParameterId weight = table.add({.name = "weight", .shape = {30, 33}, .offset = 0});
    const so::ParameterId bias = table.add({.name = "bias", .shape = {10}, .offset = 990});

    using Optimizer = so::ZeroOptimizer<so::SGD, so::FlatSharding, so::Threads<so::Host>, so::FullPrecision>;
    const Optimizer::Config config{.groups = {{"default", {.lr = 0.25}}}};
    const so::Host::Stream stream{};
    Optimizer optimizer(table, config, std::move(comm), so::FlatBuffers{parameters.data(), gradients.data()},
                        stream);

    for (int step = 0; step < 10; ++step) {
      optimizer.wait_parameters(stream);
      for (std::size_t n = 990; n < 1000; ++n) gradients[n] = 2 * (parameters[n] + 1);
      optimizer.gradient_ready(bias, stream);
      for (std::size_t n = 0; n < 990; ++n) gradients[n] = 2 * (parameters[n] - 3);
      optimizer.gradient_ready(weight, stream);
      const so::StepTicket ticket = optimizer.step({.gradient_scale = 1.0F / ranks}, stream);
      if (rank == 0) std::printf("step %2d  gradient norm %.4f\n", step + 1, ticket.get().norm);
      optimizer.zero_gradients(stream);
    }
    optimizer.wait_parameters(stream);
    if (rank == 0) result = parameters;
  });
  // each step halves the distance
  const bool right =
      std::abs(result[0] - 3.0F * (1 - 0x1p-10F)) < 1e-6F && std::abs(result[999] + (1 - 0x1p-10F)) < 1e-6F;
  std::printf("%s: weight %.6f, bias %.6f\n", right ? "right" : "WRONG", result[0], result[999]);
  return right ? 0 : 1;
}
