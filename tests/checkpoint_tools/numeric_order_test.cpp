// SPDX-License-Identifier: Apache-2.0
#include <shardopt/checkpoint/numeric_order.hpp>

#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <string>
#include <vector>

using shardopt::checkpoint::numeric_less;

TEST_CASE("names are ordered by their numbers, of any length", "[checkpoint][host]") {
  const std::vector<std::string> ordered{"",
                                         "a",
                                         "dp-0-of-16",
                                         "dp-2-of-16",
                                         "dp-10-of-16",
                                         "layer",
                                         "layer.2",
                                         "layer.2.bias",
                                         "layer.2.weight",
                                         "layer.10.bias",
                                         "layer.99999999999999999999998",
                                         "layer.99999999999999999999999",
                                         "layer.bias",
                                         "x1y2",
                                         "x1y10",
                                         "x2y1"};
  for (std::size_t a = 0; a < ordered.size(); ++a) {
    for (std::size_t b = 0; b < ordered.size(); ++b) {
      CAPTURE(ordered[a], ordered[b]);
      CHECK(numeric_less(ordered[a], ordered[b]) == (a < b));
    }
  }
}

TEST_CASE("names that differ in leading zeros only are ordered, too", "[checkpoint][host]") {
  CHECK(numeric_less("a.01", "a.1") != numeric_less("a.1", "a.01"));
  CHECK(numeric_less("a.01", "a.2"));
  CHECK(numeric_less("a.1", "a.02"));
  CHECK(numeric_less("a.0", "a.1"));
  CHECK_FALSE(numeric_less("a.0", "a.0"));
}
