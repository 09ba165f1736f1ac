// SPDX-License-Identifier: Apache-2.0
#include <support/cuda_calls.hpp>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <utility>

extern "C" cudaError_t __real_cudaGetLastError();

namespace test::cuda_calls {
namespace {

struct Failure {
  std::int64_t left;  ///< calls until it, 0: each
  int status;
};

struct Record {
  std::mutex mutex;
  std::map<std::string, std::int64_t, std::less<>> calls;
  std::map<std::string, Failure, std::less<>> failures;
  std::vector<std::int64_t> device;
  std::vector<std::int64_t> pinned;
  std::set<std::pair<int, int>> parted;
};

Record& record() {
  static Record instance;
  return instance;
}

/// Counts a call. @return what it is to return instead of being made, or 0
int note(const char* function, std::vector<std::int64_t>* list = nullptr, std::size_t bytes = 0) {
  const std::lock_guard lock(record().mutex);
  ++record().calls[function];
  const auto failure = record().failures.find(function);
  if (failure != record().failures.end()) {
    if (failure->second.left == 0) return failure->second.status;
    if (--failure->second.left == 0) {
      const int status = failure->second.status;
      record().failures.erase(failure);
      return status;
    }
  }
  if (list != nullptr) list->push_back(static_cast<std::int64_t>(bytes));
  return 0;
}

void deny_parted(int from, int to, int* possible) {
  const std::lock_guard lock(record().mutex);
  if (record().parted.contains({from, to})) *possible = 0;
}

/// Notes a copy from or to memory that is neither a device's nor page-locked.
void note_pageable(const void* to, const void* from) {
  for (const void* address : {to, from}) {
    cudaPointerAttributes attributes{};
    const cudaError_t before = cudaPeekAtLastError();
    const cudaError_t status = cudaPointerGetAttributes(&attributes, address);
    if (status != cudaSuccess && before == cudaSuccess) static_cast<void>(__real_cudaGetLastError());
    if (status == cudaSuccess && attributes.type == cudaMemoryTypeUnregistered) note("pageable copy");
  }
}

std::atomic<void (*)(const char*)> failure_observer{nullptr};

void tell(const char* function) {
  if (auto* const observer = failure_observer.load()) observer(function);
}

[[maybe_unused]] cudaError_t told(const char* function, cudaError_t status) {
  const bool expected =
      status == cudaSuccess || status == cudaErrorNotReady || status == cudaErrorPeerAccessAlreadyEnabled;
  if (!expected && std::string_view(function) != "cudaGetLastError") tell(function);
  return status;
}
[[maybe_unused]] ncclResult_t told(const char* function, ncclResult_t status) {
  if (status != ncclSuccess && status != ncclInProgress) tell(function);
  return status;
}

std::int64_t sum(std::initializer_list<std::string_view> functions) {
  std::int64_t total = 0;
  for (const std::string_view function : functions) total += count(function);
  return total;
}

}  // namespace

void reset() {
  const std::lock_guard lock(record().mutex);
  record().calls.clear();
  record().failures.clear();
  record().parted.clear();
  record().device.clear();
  record().pinned.clear();
}

void fail(const std::string& function, std::int64_t n, int status) {
  const std::lock_guard lock(record().mutex);
  record().failures[function] = {n, status};
}

void part(int from, int to) {
  const std::lock_guard lock(record().mutex);
  record().parted.insert({from, to});
}

void on_failure(void (*observer)(const char* function)) { failure_observer = observer; }

std::int64_t count(std::string_view function) {
  const std::lock_guard lock(record().mutex);
  const auto found = record().calls.find(function);
  return found == record().calls.end() ? 0 : found->second;
}

std::int64_t waits() {
  return sum({"cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy",
              "cudaMemset", "pageable copy", "cudaStreamQuery", "cudaEventQuery", "cudaMalloc", "cudaFree",
              "cudaHostAlloc", "cudaMallocHost", "cudaFreeHost", "cudaHostRegister"});
}

std::int64_t launches() { return sum({"cudaLaunchKernelExC", "cudaLaunchKernel"}); }

std::int64_t enqueued() {
  return launches() +
         sum({"cudaMemcpyAsync", "cudaMemcpy", "cudaMemsetAsync", "cudaMemset", "cudaEventRecord",
              "cudaStreamWaitEvent", "ncclReduceScatter", "ncclAllGather", "ncclAllReduce", "ncclBroadcast",
              "ncclReduce", "ncclSend", "ncclRecv", "ncclGroupStart"});
}

std::vector<std::int64_t> device_allocations() {
  const std::lock_guard lock(record().mutex);
  return record().device;
}

std::vector<std::int64_t> pinned_allocations() {
  const std::lock_guard lock(record().mutex);
  return record().pinned;
}

std::int64_t other_allocations() { return sum({"cudaMallocAsync", "cudaMallocManaged", "cudaHostRegister"}); }

}  // namespace test::cuda_calls

#define SHARDOPT_TEST_WRAP(result, name, parameters, arguments)    \
  extern "C" result __real_##name parameters;                      \
  extern "C" result __wrap_##name parameters {                     \
    const int status = test::cuda_calls::note(#name);              \
    if (status != 0) return static_cast<result>(status);           \
    return test::cuda_calls::told(#name, __real_##name arguments); \
  }

SHARDOPT_TEST_WRAP(cudaError_t, cudaLaunchKernelExC,
                   (const cudaLaunchConfig_t* configuration, const void* kernel, void** arguments),
                   (configuration, kernel, arguments))
SHARDOPT_TEST_WRAP(cudaError_t, cudaLaunchKernel,
                   (const void* kernel, dim3 grid, dim3 block, void** arguments, std::size_t shared,
                    cudaStream_t stream),
                   (kernel, grid, block, arguments, shared, stream))
SHARDOPT_TEST_WRAP(cudaError_t, cudaMemcpy,
                   (void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind),
                   (to, from, bytes, kind))
SHARDOPT_TEST_WRAP(cudaError_t, cudaMemsetAsync,
                   (void* to, int value, std::size_t bytes, cudaStream_t stream), (to, value, bytes, stream))
SHARDOPT_TEST_WRAP(cudaError_t, cudaMemset, (void* to, int value, std::size_t bytes), (to, value, bytes))
SHARDOPT_TEST_WRAP(cudaError_t, cudaEventRecord, (cudaEvent_t event, cudaStream_t stream), (event, stream))
SHARDOPT_TEST_WRAP(cudaError_t, cudaStreamWaitEvent,
                   (cudaStream_t stream, cudaEvent_t event, unsigned int flags), (stream, event, flags))
SHARDOPT_TEST_WRAP(cudaError_t, cudaStreamQuery, (cudaStream_t stream), (stream))
SHARDOPT_TEST_WRAP(cudaError_t, cudaEventCreateWithFlags, (cudaEvent_t * event, unsigned int flags),
                   (event, flags))
SHARDOPT_TEST_WRAP(cudaError_t, cudaEventDestroy, (cudaEvent_t event), (event))
SHARDOPT_TEST_WRAP(cudaError_t, cudaEventQuery, (cudaEvent_t event), (event))
SHARDOPT_TEST_WRAP(cudaError_t, cudaStreamCreateWithFlags, (cudaStream_t * stream, unsigned int flags),
                   (stream, flags))
SHARDOPT_TEST_WRAP(cudaError_t, cudaStreamDestroy, (cudaStream_t stream), (stream))
#if CUDART_VERSION >= 13000
SHARDOPT_TEST_WRAP(cudaError_t, cudaStreamGetCaptureInfo,
                   (cudaStream_t stream, cudaStreamCaptureStatus* status_out, unsigned long long* id,
                    cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                    std::size_t* count),
                   (stream, status_out, id, graph, nodes, edges, count))
#else
SHARDOPT_TEST_WRAP(cudaError_t, cudaStreamGetCaptureInfo,
                   (cudaStream_t stream, cudaStreamCaptureStatus* status_out, unsigned long long* id),
                   (stream, status_out, id))
#endif
SHARDOPT_TEST_WRAP(cudaError_t, cudaThreadExchangeStreamCaptureMode, (cudaStreamCaptureMode * mode), (mode))
SHARDOPT_TEST_WRAP(cudaError_t, cudaStreamBeginCapture, (cudaStream_t stream, cudaStreamCaptureMode mode),
                   (stream, mode))
SHARDOPT_TEST_WRAP(cudaError_t, cudaStreamEndCapture, (cudaStream_t stream, cudaGraph_t* graph),
                   (stream, graph))
SHARDOPT_TEST_WRAP(cudaError_t, cudaGraphInstantiate,
                   (cudaGraphExec_t * executable, cudaGraph_t graph, unsigned long long flags),
                   (executable, graph, flags))
SHARDOPT_TEST_WRAP(cudaError_t, cudaGraphLaunch, (cudaGraphExec_t executable, cudaStream_t stream),
                   (executable, stream))
SHARDOPT_TEST_WRAP(cudaError_t, cudaGraphDestroy, (cudaGraph_t graph), (graph))
SHARDOPT_TEST_WRAP(cudaError_t, cudaGraphExecDestroy, (cudaGraphExec_t executable), (executable))
SHARDOPT_TEST_WRAP(cudaError_t, cudaGetDevice, (int* device), (device))
SHARDOPT_TEST_WRAP(cudaError_t, cudaGetDeviceCount, (int* count), (count))
SHARDOPT_TEST_WRAP(cudaError_t, cudaStreamSynchronize, (cudaStream_t stream), (stream))
SHARDOPT_TEST_WRAP(cudaError_t, cudaEventSynchronize, (cudaEvent_t event), (event))
SHARDOPT_TEST_WRAP(cudaError_t, cudaDeviceSynchronize, (), ())
SHARDOPT_TEST_WRAP(cudaError_t, cudaSetDevice, (int device), (device))
SHARDOPT_TEST_WRAP(cudaError_t, cudaGetLastError, (), ())
SHARDOPT_TEST_WRAP(cudaError_t, cudaDeviceEnablePeerAccess, (int device, unsigned int flags), (device, flags))
SHARDOPT_TEST_WRAP(cudaError_t, cudaMallocAsync, (void** memory, std::size_t bytes, cudaStream_t stream),
                   (memory, bytes, stream))
SHARDOPT_TEST_WRAP(cudaError_t, cudaMallocManaged, (void** memory, std::size_t bytes, unsigned int flags),
                   (memory, bytes, flags))
SHARDOPT_TEST_WRAP(cudaError_t, cudaHostRegister, (void* memory, std::size_t bytes, unsigned int flags),
                   (memory, bytes, flags))
SHARDOPT_TEST_WRAP(cudaError_t, cudaFree, (void* memory), (memory))
SHARDOPT_TEST_WRAP(cudaError_t, cudaFreeHost, (void* memory), (memory))

SHARDOPT_TEST_WRAP(ncclResult_t, ncclReduceScatter,
                   (const void* from, void* to, std::size_t count, ncclDataType_t type, ncclRedOp_t operation,
                    ncclComm_t comm, cudaStream_t stream),
                   (from, to, count, type, operation, comm, stream))
SHARDOPT_TEST_WRAP(ncclResult_t, ncclAllGather,
                   (const void* from, void* to, std::size_t count, ncclDataType_t type, ncclComm_t comm,
                    cudaStream_t stream),
                   (from, to, count, type, comm, stream))
SHARDOPT_TEST_WRAP(ncclResult_t, ncclAllReduce,
                   (const void* from, void* to, std::size_t count, ncclDataType_t type, ncclRedOp_t operation,
                    ncclComm_t comm, cudaStream_t stream),
                   (from, to, count, type, operation, comm, stream))
SHARDOPT_TEST_WRAP(ncclResult_t, ncclBroadcast,
                   (const void* from, void* to, std::size_t count, ncclDataType_t type, int root,
                    ncclComm_t comm, cudaStream_t stream),
                   (from, to, count, type, root, comm, stream))
SHARDOPT_TEST_WRAP(ncclResult_t, ncclReduce,
                   (const void* from, void* to, std::size_t count, ncclDataType_t type, ncclRedOp_t operation,
                    int root, ncclComm_t comm, cudaStream_t stream),
                   (from, to, count, type, operation, root, comm, stream))
SHARDOPT_TEST_WRAP(ncclResult_t, ncclSend,
                   (const void* from, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                    cudaStream_t stream),
                   (from, count, type, peer, comm, stream))
SHARDOPT_TEST_WRAP(ncclResult_t, ncclRecv,
                   (void* to, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                    cudaStream_t stream),
                   (to, count, type, peer, comm, stream))
SHARDOPT_TEST_WRAP(ncclResult_t, ncclGroupStart, (), ())
SHARDOPT_TEST_WRAP(ncclResult_t, ncclGroupEnd, (), ())
SHARDOPT_TEST_WRAP(ncclResult_t, ncclGetUniqueId, (ncclUniqueId * id), (id))
SHARDOPT_TEST_WRAP(ncclResult_t, ncclCommInitRank, (ncclComm_t * comm, int world, ncclUniqueId id, int rank),
                   (comm, world, id, rank))
SHARDOPT_TEST_WRAP(ncclResult_t, ncclCommInitRankConfig,
                   (ncclComm_t * comm, int world, ncclUniqueId id, int rank, ncclConfig_t* config),
                   (comm, world, id, rank, config))
SHARDOPT_TEST_WRAP(ncclResult_t, ncclCommUserRank, (ncclComm_t comm, int* rank), (comm, rank))
SHARDOPT_TEST_WRAP(ncclResult_t, ncclCommCount, (ncclComm_t comm, int* count), (comm, count))
SHARDOPT_TEST_WRAP(ncclResult_t, ncclCommCuDevice, (ncclComm_t comm, int* device), (comm, device))
SHARDOPT_TEST_WRAP(ncclResult_t, ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t* status_out),
                   (comm, status_out))
SHARDOPT_TEST_WRAP(ncclResult_t, ncclCommDestroy, (ncclComm_t comm), (comm))
SHARDOPT_TEST_WRAP(ncclResult_t, ncclCommAbort, (ncclComm_t comm), (comm))

#define SHARDOPT_TEST_WRAP_ALLOCATION(name, list, parameters, arguments)                       \
  extern "C" cudaError_t __real_##name parameters;                                             \
  extern "C" cudaError_t __wrap_##name parameters {                                            \
    const int status = test::cuda_calls::note(#name, &test::cuda_calls::record().list, bytes); \
    if (status != 0) return static_cast<cudaError_t>(status);                                  \
    return test::cuda_calls::told(#name, __real_##name arguments);                             \
  }

SHARDOPT_TEST_WRAP_ALLOCATION(cudaMalloc, device, (void** memory, std::size_t bytes), (memory, bytes))
SHARDOPT_TEST_WRAP_ALLOCATION(cudaHostAlloc, pinned, (void** memory, std::size_t bytes, unsigned int flags),
                              (memory, bytes, flags))
SHARDOPT_TEST_WRAP_ALLOCATION(cudaMallocHost, pinned, (void** memory, std::size_t bytes), (memory, bytes))

#define SHARDOPT_TEST_WRAP_ANSWER(name, parameters, arguments, change) \
  extern "C" cudaError_t __real_##name parameters;                     \
  extern "C" cudaError_t __wrap_##name parameters {                    \
    const int status = test::cuda_calls::note(#name);                  \
    if (status != 0) return static_cast<cudaError_t>(status);          \
    const cudaError_t answer = __real_##name arguments;                \
    test::cuda_calls::change;                                          \
    return test::cuda_calls::told(#name, answer);                      \
  }

SHARDOPT_TEST_WRAP_ANSWER(cudaDeviceCanAccessPeer, (int* possible, int device, int peer),
                          (possible, device, peer), deny_parted(device, peer, possible))

#define SHARDOPT_TEST_WRAP_COPY(name, parameters, arguments)       \
  extern "C" cudaError_t __real_##name parameters;                 \
  extern "C" cudaError_t __wrap_##name parameters {                \
    const int status = test::cuda_calls::note(#name);              \
    if (status != 0) return static_cast<cudaError_t>(status);      \
    if (bytes > 0) test::cuda_calls::note_pageable(to, from);      \
    return test::cuda_calls::told(#name, __real_##name arguments); \
  }

SHARDOPT_TEST_WRAP_COPY(cudaMemcpyAsync,
                        (void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                         cudaStream_t stream),
                        (to, from, bytes, kind, stream))
