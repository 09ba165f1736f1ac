// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_test_macros.hpp>
#include <shardopt/core/shape.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace so = shardopt;

TEST_CASE("A shape without dimensions is a scalar, one with a zero dimension is empty", "[core][host]") {
  CHECK(so::Shape{}.numel() == 1);
  CHECK(so::Shape{0}.numel() == 0);
  CHECK(so::Shape{8, 0}.numel() == 0);
  CHECK(so::Shape{0, 8} != so::Shape{8, 0});
  CHECK(so::Shape{0, 8}.text() == "[0, 8]");
  CHECK(so::Shape{}.text() == "[]");
}

TEST_CASE("A shape takes the engine's own integers and containers", "[core][host]") {
  const std::vector<int> ints{2, 3, 4};
  const std::array<std::size_t, 2> sizes{5, 6};
  const std::vector<std::int64_t> wide{1LL << 33};
  CHECK(so::Shape(ints) == so::Shape{2, 3, 4});
  CHECK(so::Shape(sizes).numel() == 30);
  CHECK(so::Shape(wide).numel() == 8589934592);
  CHECK(so::Shape{short{3}, 4U, 5L}.dimensions() == std::vector<std::int64_t>{3, 4, 5});
}

TEST_CASE("A product of dimensions that does not fit in 64 bits is refused, unless it is zero",
          "[core][host]") {
  const std::int64_t large = std::int64_t{1} << 32;
  CHECK(so::Shape{large, std::int64_t{1} << 30}.numel() == std::int64_t{1} << 62);
  CHECK_THROWS_AS((so::Shape{large, std::int64_t{1} << 31}.numel()), std::invalid_argument);
  CHECK_THROWS_AS((so::Shape{large, large}.numel()), std::invalid_argument);
  CHECK(so::Shape{large, large, 0}.numel() == 0);
}

TEST_CASE("A negative or too large count is refused with its value", "[core][host]") {
  CHECK_THROWS_AS(so::Shape{-1}, std::invalid_argument);
  CHECK_THROWS_AS(so::Count((std::numeric_limits<std::uint64_t>::max)()), std::invalid_argument);
  CHECK(so::Count((std::numeric_limits<std::int64_t>::max)()).value() ==
        (std::numeric_limits<std::int64_t>::max)());
  try {
    static_cast<void>(so::Count(-77));
    FAIL();
  } catch (const std::invalid_argument& error) {
    CHECK(std::string(error.what()).find("-77") != std::string::npos);
  }
}
