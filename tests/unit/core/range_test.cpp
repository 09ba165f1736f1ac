// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_test_macros.hpp>
#include <shardopt/core/range.hpp>

namespace so = shardopt;

TEST_CASE("A range holds its begin and not its end", "[core][host]") {
  constexpr so::Range range{3, 7};
  STATIC_REQUIRE(range.size() == 4);
  STATIC_REQUIRE(!range.empty());
  STATIC_REQUIRE(range.contains(3));
  STATIC_REQUIRE(range.contains(6));
  STATIC_REQUIRE(!range.contains(2));
  STATIC_REQUIRE(!range.contains(7));
}

TEST_CASE("An empty range owns nothing wherever it stands, even with its ends swapped", "[core][host]") {
  for (const so::Range range : {so::Range{}, so::Range{5, 5}, so::Range{9, 2}}) {
    CHECK(range.empty());
    CHECK(range.size() == 0);
    CHECK_FALSE(range.contains(5));
  }
}

TEST_CASE("An intersection is what both ranges have, and may be empty", "[core][host]") {
  CHECK(so::intersection({0, 10}, {4, 20}) == so::Range{4, 10});
  CHECK(so::intersection({4, 20}, {0, 10}) == so::Range{4, 10});
  CHECK(so::intersection({0, 10}, {2, 3}) == so::Range{2, 3});
  CHECK(so::intersection({0, 4}, {4, 8}).empty());
  CHECK(so::intersection({0, 4}, {6, 8}).empty());
  CHECK(so::intersection({3000000000, 9000000000}, {8000000000, 9500000000}).size() == 1000000000);
}

TEST_CASE("Rounding up reaches the next multiple and stays on one", "[core][host]") {
  STATIC_REQUIRE(so::round_up(0, 256) == 0);
  STATIC_REQUIRE(so::round_up(1, 256) == 256);
  STATIC_REQUIRE(so::round_up(256, 256) == 256);
  STATIC_REQUIRE(so::round_up(257, 256) == 512);
  STATIC_REQUIRE(so::round_up(4294967297, 3) == 4294967298);
}
