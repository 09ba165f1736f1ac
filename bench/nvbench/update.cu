// SPDX-License-Identifier: Apache-2.0
// The update kernel: rule × precision × size.
#include <bench/nvbench/measure.cuh>
#include <bench/nvbench/types.cuh>

#include <type_traits>

namespace {

template <class Rule>
Rule example() {
  if constexpr (std::is_same_v<Rule, shardopt::SGD>) {
    return {.momentum = 0.9};
  } else {
    return {};
  }
}

template <class Rule, class Precision>
void update(nvbench::state& state, nvbench::type_list<Rule, Precision>) {
  const auto elements = state.get_int64("elements");
  bench::measure(state, elements, bench::Update<Rule, Precision>(elements, example<Rule>()));
}

void copy(nvbench::state& state) {
  const auto bytes = state.get_int64("bytes");
  bench::measure(state, bytes, bench::Copy(bytes));
}

using Rules = nvbench::type_list<shardopt::Adam, shardopt::AdamAmsgrad, shardopt::AdamW,
                                 shardopt::AdamWAmsgrad, shardopt::SGD>;
using Precisions =
    nvbench::type_list<bench::Fp32, bench::Bf16, bench::Bf16Fp32, bench::Fp16, bench::Fp16Fp32>;

}  // namespace

NVBENCH_BENCH(copy).add_int64_power_of_two_axis("bytes", {20, 24, 28, 30});
NVBENCH_BENCH_TYPES(update, NVBENCH_TYPE_AXES(Rules, Precisions))
    .set_type_axes_names({"rule", "precision"})
    .add_int64_power_of_two_axis("elements", {16, 20, 24, 28});
