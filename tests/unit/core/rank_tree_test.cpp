// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_test_macros.hpp>
#include <shardopt/core/rank_tree.hpp>
#include <support/numbers.hpp>

#include <vector>

namespace so = shardopt;

namespace {

float value_of_rank(int rank) {
  return static_cast<float>(static_cast<double>(test::noise(91, rank) % 1000003) / 7 - 6e4);
}

SHARDOPT_TARGET_AVX2 float library_sum(int world, std::vector<int>* order = nullptr) {
  return so::detail::sum_over_ranks<20, float>(world, [&](int rank) {
    if (order != nullptr) order->push_back(rank);
    return value_of_rank(rank);
  });
}

SHARDOPT_TARGET_AVX2 float sum_of_ones(int world) {
  return so::detail::sum_over_ranks<so::detail::device_rank_levels, float>(world, [](int) { return 1.0f; });
}

/// Adjacent pairs level by level, an odd last one carried up.
float tree_sum(int world) {
  std::vector<float> level;
  for (int rank = 0; rank < world; ++rank) level.push_back(value_of_rank(rank));
  while (level.size() > 1) {
    std::vector<float> next;
    for (std::size_t k = 0; k + 1 < level.size(); k += 2) next.push_back(level[k] + level[k + 1]);
    if (level.size() % 2 != 0) next.push_back(level.back());
    level = next;
  }
  return level[0];
}

}  // namespace

TEST_CASE("Ranks are added by adjacent pairs level by level, an odd last one carried up", "[core][host]") {
  for (int world = 1; world <= 200; ++world) {
    CAPTURE(world);
    REQUIRE(library_sum(world) == tree_sum(world));
  }
}

TEST_CASE("As many ranks are added as the levels on a device allow", "[core][host]") {
  for (const int world : {1, 2048, 4094, (1 << so::detail::device_rank_levels) - 1})
    CHECK(sum_of_ones(world) == static_cast<float>(world));
}

TEST_CASE("Each rank is read once, in order", "[core][host]") {
  std::vector<int> order;
  library_sum(7, &order);
  CHECK(order == std::vector<int>{0, 1, 2, 3, 4, 5, 6});
}
