// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

/// What a test program's own code asks of CUDA and NCCL. The calls are wrapped by the linker
/// (`target_link_options` in cuda_calls.cmake), so this works on every device and needs no launcher.
namespace test::cuda_calls {

/// Forgets what was counted, and what was to fail.
void reset();

/// From now on the n-th call of a function, counted over all threads, returns `status` and does nothing; 0:
/// each call.
void fail(const std::string& function, std::int64_t n, int status);

/// From now on CUDA says that device `from` cannot read the memory of device `to`.
void part(int from, int to);

/// From now on `observer` is told of each call that fails, by the thread that makes it, before it returns:
/// not of "not ready", "in progress" and "already enabled", nor of what cudaGetLastError tells again.
void on_failure(void (*observer)(const char* function));

/// How often a function was called since then, over all threads: "cudaMalloc", "ncclReduceScatter", …
[[nodiscard]] std::int64_t count(std::string_view function);

/// Calls that enqueue something: launches, copies, fills, event records, waits of streams, collectives.
[[nodiscard]] std::int64_t enqueued();

/// Calls that make the host wait for a device, or may: for streams and events, synchronous copies and fills,
/// copies of memory that is not page-locked whatever their name says, allocations and frees; and questions
/// whether something is done, which waiting loops are made of. (The thread that watches a communicator asks,
/// too.)
[[nodiscard]] std::int64_t waits();

/// Bytes of each allocation since then, in order.
[[nodiscard]] std::vector<std::int64_t> device_allocations();
[[nodiscard]] std::vector<std::int64_t> pinned_allocations();

/// Calls that allocate in a way the library does not promise to account for: managed, asynchronous, arrays.
[[nodiscard]] std::int64_t other_allocations();

/// The kernels launched since then: how often in all.
[[nodiscard]] std::int64_t launches();

}  // namespace test::cuda_calls
