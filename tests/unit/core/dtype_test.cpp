// SPDX-License-Identifier: Apache-2.0
#include <shardopt/core/dtype.hpp>

#include <catch2/catch_test_macros.hpp>

namespace so = shardopt;

TEST_CASE("an element type knows its size and its name", "[core][host]") {
  CHECK(so::size_of(so::Dtype::fp32) == sizeof(float));
  CHECK(so::size_of(so::Dtype::bf16) == sizeof(so::bf16));
  CHECK(so::size_of(so::Dtype::fp16) == sizeof(so::fp16));
  CHECK(so::size_of(so::Dtype::int64) == 8);
  CHECK(so::size_of(so::Dtype::uint8) == 1);
  CHECK(so::name_of(so::Dtype::bf16) == "bf16");
  CHECK(so::name_of(so::Dtype::fp16) == "fp16");
}

TEST_CASE("C++ types map to element types", "[core][host]") {
  STATIC_CHECK(so::dtype_of<float> == so::Dtype::fp32);
  STATIC_CHECK(so::dtype_of<so::bf16> == so::Dtype::bf16);
  STATIC_CHECK(so::dtype_of<so::fp16> == so::Dtype::fp16);
}
