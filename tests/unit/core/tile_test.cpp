// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_test_macros.hpp>
#include <shardopt/core/tile.hpp>

namespace so = shardopt;

TEST_CASE("A tile's first grain ends at a multiple of 256 of the flat index, or with the tile",
          "[core][host]") {
  const auto first = [](std::uint32_t count, std::uint16_t phase) {
    return so::Tile{
        .parameter = nullptr, .gradient = nullptr, .state = 0, .count = count, .group = 0, .phase = phase}
        .first_grain();
  };
  CHECK(first(2048, 0) == 256);
  CHECK(first(2048, 255) == 1);
  CHECK(first(2048, 1) == 255);
  CHECK(first(10, 0) == 10);
  CHECK(first(10, 250) == 6);
  CHECK(first(6, 250) == 6);
  CHECK(first(1, 255) == 1);
}
