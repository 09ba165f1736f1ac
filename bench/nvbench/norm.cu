// SPDX-License-Identifier: Apache-2.0
// The norm kernel: type × size.
#include <bench/nvbench/measure.cuh>
#include <bench/nvbench/types.cuh>

namespace {

template <class Grad>
void norm(nvbench::state& state, nvbench::type_list<Grad>) {
  const auto elements = state.get_int64("elements");
  bench::measure(state, elements, bench::Norm<Grad>(elements));
}

using Gradients = nvbench::type_list<float, shardopt::bf16, shardopt::fp16>;

}  // namespace

NVBENCH_BENCH_TYPES(norm, NVBENCH_TYPE_AXES(Gradients))
    .set_type_axes_names({"gradients"})
    .add_int64_power_of_two_axis("elements", {16, 20, 24, 28});
