// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <support/cuda_ranks.hpp>

#include <cuda_runtime_api.h>

namespace test {

/// What a body enqueues, as one graph: nothing of it has run yet.
class CapturedGraph {
 public:
  /// @param stream  where the capture begins and ends; the body may fork others from it
  template <class Body>
  CapturedGraph(cudaStream_t stream, const Body& body) {
    cudaGraph_t graph = nullptr;
    succeed(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    try {
      body();
    } catch (...) {
      static_cast<void>(cudaStreamEndCapture(stream, &graph));
      static_cast<void>(cudaGraphDestroy(graph));
      static_cast<void>(cudaGetLastError());
      throw;
    }
    succeed(cudaStreamEndCapture(stream, &graph));
    const cudaError_t status = cudaGraphInstantiate(&executable_, graph, 0);
    static_cast<void>(cudaGraphDestroy(graph));
    succeed(status);
  }
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;
  ~CapturedGraph() { static_cast<void>(cudaGraphExecDestroy(executable_)); }

  void replay(cudaStream_t stream) const { succeed(cudaGraphLaunch(executable_, stream)); }

 private:
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace test
