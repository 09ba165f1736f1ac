// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/devices/cuda_error.cuh>

#include <cuda_runtime_api.h>

namespace shardopt::inline v0 {

/// Makes a device current for as long as it lives, then the one before again. On a thread that never chose a
/// device that is device 0, where CUDA then makes a context: each thread should choose its own
/// (cudaSetDevice) before it calls the library.
class CudaDeviceGuard {
 public:
  /// @throws CudaError
  explicit CudaDeviceGuard(int device) {
    throw_if_failed(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ == device) return;
    throw_if_failed(cudaSetDevice(device), "cudaSetDevice");
    changed_ = true;
  }
  CudaDeviceGuard(const CudaDeviceGuard&) = delete;
  CudaDeviceGuard& operator=(const CudaDeviceGuard&) = delete;
  ~CudaDeviceGuard() {
    if (changed_) static_cast<void>(cudaSetDevice(before_));
  }

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace shardopt::inline v0
