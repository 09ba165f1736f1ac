// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/error.hpp>

#include <cuda_runtime_api.h>

#include <string>

namespace shardopt::inline v0 {

/// A call of the CUDA runtime failed.
class CudaError : public Error {
 public:
  /// Names the call, the runtime's texts for the failure, and the place.
  CudaError(cudaError_t status, const char* call, Location where)
      : Error(std::string("shardopt: ") + call + " failed: " + cudaGetErrorName(status) + " (" +
              cudaGetErrorString(status) + "), in " + detail::text_of(where)),
        status_(status) {}

  /// The runtime's code.
  [[nodiscard]] cudaError_t status() const noexcept { return status_; }

 private:
  cudaError_t status_;
};

/// @throws CudaError unless the call succeeded
inline void throw_if_failed(cudaError_t status, const char* call, Location where = Location::current()) {
  if (status != cudaSuccess) throw CudaError(status, call, where);
}

}  // namespace shardopt::inline v0
