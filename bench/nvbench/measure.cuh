// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bench/workloads.cuh>

#include <nvbench/nvbench.cuh>

#include <cstddef>
#include <cstdint>

namespace bench {

/// Measures a workload's launches, beside the bytes that it declares.
/// @param tag  how nvbench may run it
template <class Workload, class Tag = nvbench::exec_tag::impl::tag<nvbench::detail::exec_flag::none>>
void measure(nvbench::state& state, std::int64_t elements, Workload&& workload, Tag tag = {}) {
  const Traffic bytes = workload.bytes();
  state.add_element_count(static_cast<std::size_t>(elements));
  state.add_global_memory_reads(static_cast<std::size_t>(bytes.read));
  state.add_global_memory_writes(static_cast<std::size_t>(bytes.written));
  // The first launch loads kernels, which may wait for the device: not while nvbench blocks the stream.
  workload.launch(state.get_cuda_stream());
  so::throw_if_failed(cudaStreamSynchronize(state.get_cuda_stream()), "cudaStreamSynchronize");
  state.exec(tag, [&](nvbench::launch& launch) { workload.launch(launch.get_stream()); });
}

}  // namespace bench
