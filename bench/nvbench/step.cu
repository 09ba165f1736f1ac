// SPDX-License-Identifier: Apache-2.0
// A whole step of AdamW with clipping: at one rank, and of eight ranks that share the GPU.
#include <bench/nvbench/measure.cuh>
#include <bench/nvbench/types.cuh>

namespace {

template <class Precision>
void step_one_rank(nvbench::state& state, nvbench::type_list<Precision>) {
  const auto elements = state.get_int64("elements");
  const bench::Stream comm_stream;
  bench::measure(
      state, elements,
      bench::Step<shardopt::AdamW, Precision>(elements, {}, state.get_cuda_stream(), comm_stream.get()),
      nvbench::exec_tag::no_batch);
}

template <class Precision>
void step_eight_ranks(nvbench::state& state, nvbench::type_list<Precision>) {
  const auto elements = state.get_int64("elements");
  bench::measure(state, elements, bench::RanksStep<shardopt::AdamW, Precision>(8, elements, {}),
                 nvbench::exec_tag::no_batch);
}

using Precisions = nvbench::type_list<bench::Fp32, bench::Bf16>;

}  // namespace

NVBENCH_BENCH_TYPES(step_one_rank, NVBENCH_TYPE_AXES(Precisions))
    .set_type_axes_names({"precision"})
    .add_int64_power_of_two_axis("elements", {20, 24, 28});
NVBENCH_BENCH_TYPES(step_eight_ranks, NVBENCH_TYPE_AXES(Precisions))
    .set_type_axes_names({"precision"})
    .add_int64_power_of_two_axis("elements", {20, 24, 27});
