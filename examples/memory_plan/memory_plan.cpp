// SPDX-License-Identifier: Apache-2.0
/// memory_plan [PARAMETERS [RANKS]]: bytes that one rank needs for a model of so many parameters, by rule and
/// precision. Allocates nothing of that.
#include <shardopt/shardopt.hpp>

#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace so = shardopt;

/// One line of the table.
template <class Rule, class Precision>
void print(const char* what, std::int64_t parameters, int world, const Rule& rule = {}) {
  using Optimizer = so::ZeroOptimizer<Rule, so::FlatSharding, so::Threads<so::Host>, Precision>;
  so::ParameterTable table;
  table.add({.name = "all", .shape = {parameters}, .offset = 0});
  const so::MemoryPlan plan =
      Optimizer::plan(table, {.groups = {{"default", rule}}}, {.rank = 0, .world = world});
  const auto each = [&](std::int64_t bytes) {
    return static_cast<double>(bytes) / static_cast<double>(parameters);
  };
  const auto gigabytes = [](std::int64_t bytes) { return static_cast<double>(bytes) * 1e-9; };
  std::printf("%-32s %5.2f + %5.2f + %6.3f = %6.3f B  %9.3f GB  (unsharded %6.3f B  %9.3f GB)\n", what,
              each(plan.parameter_bytes), each(plan.gradient_bytes),
              each(plan.state_bytes + plan.master_bytes), each(plan.model_bytes()),
              gigabytes(plan.model_bytes()), each(plan.unsharded_model_bytes()),
              gigabytes(plan.unsharded_model_bytes()));
}

int main(int argc, char** argv) try {
  const std::int64_t parameters = argc > 1 ? std::stoll(argv[1]) : 7'500'000'000;
  const int world = argc > 2 ? std::stoi(argv[2]) : 64;
  if (parameters < 1 || world < 1 || argc > 3) throw std::invalid_argument("both must be at least 1");
  using Bf16 = so::Mixed<so::bf16, so::bf16, float>;
  using Bf16Fp32Grads = so::Mixed<so::bf16, float, float>;
  std::printf("rank 0 of %d, %lld parameters: bytes of parameters + gradients + states and masters\n", world,
              static_cast<long long>(parameters));
  print<so::AdamW, so::FullPrecision>("AdamW, fp32", parameters, world);
  print<so::AdamW, Bf16>("AdamW, bf16, master", parameters, world);
  print<so::AdamW, Bf16Fp32Grads>("AdamW, bf16, fp32 grads, master", parameters, world);
  print<so::SGD, so::FullPrecision>("SGD with momentum, fp32", parameters, world, so::SGD{.momentum = 0.9});
  print<so::SGD, so::FullPrecision>("SGD without momentum, fp32", parameters, world);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "memory_plan [PARAMETERS [RANKS]]: %s\n", error.what());
  return 2;
}
