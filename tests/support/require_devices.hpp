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

/// Likewise where one of so many GPUs cannot read another's memory.
inline void require_peers(int wanted) {
  require_devices(wanted);
  for (int from = 0; from < wanted; ++from) {
    for (int to = 0; to < wanted; ++to) {
      int possible = 0;
      if (from != to) REQUIRE(cudaDeviceCanAccessPeer(&possible, from, to) == cudaSuccess);
      if (from != to && possible == 0) SKIP("device " << from << " cannot read the memory of device " << to);
    }
  }
}

}  // namespace test
