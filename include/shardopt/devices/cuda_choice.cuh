// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/error.hpp>
#include <shardopt/devices/cuda_error.cuh>

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace shardopt::inline v0::detail {

/// @throws std::invalid_argument for a device that does not exist, naming those that do; CudaError if CUDA
/// sees none
inline void require_device(int ordinal) {
  int count = 0;
  throw_if_failed(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  if (ordinal >= 0 && ordinal < count) return;
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  throw std::invalid_argument(
      "shardopt: device " + std::to_string(ordinal) + " does not exist: this process sees " +
      (count == 1 ? "one device, 0" : std::to_string(count) + " devices, 0 to " + std::to_string(count - 1)) +
      " (CUDA_VISIBLE_DEVICES is " + (visible != nullptr ? in_quotes(visible) : "not set") + ")");
}

/// "device 0 (NVIDIA H100, PCI 0000:1B:00.0)", for messages: as much of it as CUDA tells.
[[nodiscard]] inline std::string text_of_device(int ordinal) {
  std::string text = "device " + std::to_string(ordinal);
  cudaDeviceProp properties{};
  char address[32] = {};
  if (cudaGetDeviceProperties(&properties, ordinal) == cudaSuccess &&
      cudaDeviceGetPCIBusId(address, sizeof address, ordinal) == cudaSuccess) {
    text += std::string(" (") + properties.name + ", PCI " + address + ")";
  } else {
    static_cast<void>(cudaGetLastError());  // another failure is being reported
  }
  return text;
}

}  // namespace shardopt::inline v0::detail
