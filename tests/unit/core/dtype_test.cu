// SPDX-License-Identifier: Apache-2.0
#include <shardopt/core/dtype.hpp>

#include <catch2/catch_test_macros.hpp>

#include <cstddef>
#include <cstdint>

namespace so = shardopt;

namespace {

__global__ void describe(std::size_t* sizes, std::uint16_t* bits) {
  sizes[0] = sizeof(so::bf16);
  sizes[1] = sizeof(so::fp16);
  *bits = so::bf16{0x3f80}.bits;
}

}  // namespace

TEST_CASE("16-bit element types have the host's layout on the device", "[core][cuda]") {
  std::size_t* sizes = nullptr;
  std::uint16_t* bits = nullptr;
  REQUIRE(cudaMalloc(&sizes, 2 * sizeof *sizes) == cudaSuccess);
  REQUIRE(cudaMalloc(&bits, sizeof *bits) == cudaSuccess);
  describe<<<1, 1>>>(sizes, bits);
  std::size_t got_sizes[2]{};
  std::uint16_t got_bits = 0;
  CHECK(cudaMemcpy(got_sizes, sizes, sizeof got_sizes, cudaMemcpyDeviceToHost) == cudaSuccess);
  CHECK(cudaMemcpy(&got_bits, bits, sizeof got_bits, cudaMemcpyDeviceToHost) == cudaSuccess);
  CHECK(cudaFree(sizes) == cudaSuccess);
  CHECK(cudaFree(bits) == cudaSuccess);
  CHECK(got_sizes[0] == sizeof(so::bf16));
  CHECK(got_sizes[1] == sizeof(so::fp16));
  CHECK(got_bits == 0x3f80);
}
