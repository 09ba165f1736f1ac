// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

namespace bits {

inline void throw_if_failed(cudaError_t status, const char* call) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
}

/// Device memory with a copy of a vector; copies wait.
template <class T>
class DeviceVector {
 public:
  explicit DeviceVector(const std::vector<T>& values) : DeviceVector(values.size()) { set(values); }
  explicit DeviceVector(std::size_t size) : size_(size) {
    throw_if_failed(cudaMalloc(&data_, size * sizeof(T)), "cudaMalloc");
  }
  ~DeviceVector() { cudaFree(data_); }
  DeviceVector(const DeviceVector&) = delete;
  DeviceVector& operator=(const DeviceVector&) = delete;

  [[nodiscard]] T* data() const { return data_; }
  void set(const std::vector<T>& values) {
    throw_if_failed(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice),
                    "cudaMemcpy");
    throw_if_failed(cudaDeviceSynchronize(),
                    "cudaDeviceSynchronize");  // copies from pageable memory may return before
  }
  [[nodiscard]] std::vector<T> values() const {
    std::vector<T> result(size_);
    throw_if_failed(cudaMemcpy(result.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost),
                    "cudaMemcpy");
    return result;
  }

 private:
  T* data_ = nullptr;
  std::size_t size_;
};

}  // namespace bits
