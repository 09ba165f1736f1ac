// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>
#include <catch2/catch_test_macros.hpp>

namespace test {

/// Skips the test case where there are fewer GPUs. The runtime starts here, on the test's own thread, which
/// outlives the ranks'.
inline void require_devices(int wanted) {
  int found = 0;
  static_cast<void>(cudaGetDeviceCount(&found));
  if (found < wanted) SKIP("needs " << wanted << " GPUs, there are " << found);
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
}

}  // namespace test
