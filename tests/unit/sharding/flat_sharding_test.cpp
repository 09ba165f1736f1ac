// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>
#include <shardopt/sharding/flat_sharding.hpp>
#include <support/plans.hpp>

#include <algorithm>
#include <cstdint>
#include <stdexcept>

using namespace test;

TEST_CASE("FlatSharding covers every space with shares that differ by less than 512 elements",
          "[sharding][host]") {
  const int world = GENERATE(range(1, 9));
  const std::int64_t bytes = GENERATE(1, 4096, 100000, 1 << 25);
  for (const Space& space : spaces()) {
    CAPTURE(world, bytes, space.elements);
    const so::ShardPlan plan = so::FlatSharding{.bucket_bytes = bytes}.plan(space.view(), world, 4);
    REQUIRE(broken(space, plan, world) == "");
    std::int64_t least = space.elements;
    std::int64_t most = 0;
    for (int rank = 0; rank < world; ++rank) {
      least = std::min(least, plan.reduced_elements(rank));
      most = std::max(most, plan.reduced_elements(rank));
    }
    CHECK(most - least < 512);
  }
}

TEST_CASE("All buckets of FlatSharding but the last have equal slices, in rank order", "[sharding][host]") {
  const Space space({5000, 1, 7000});
  const so::ShardPlan plan = so::FlatSharding{.bucket_bytes = 5000}.plan(space.view(), 3, 4);
  // 1250 elements, rounded up to a multiple of 3 · 256.
  REQUIRE(plan.buckets.size() == 8);
  for (std::size_t k = 0; k + 1 < plan.buckets.size(); ++k) {
    CHECK(plan.buckets[k].size() == 1536);
    for (std::size_t rank = 0; rank < 3; ++rank) {
      CHECK(plan.runs[3 * k + rank].owner == static_cast<int>(rank));
      CHECK(plan.runs[3 * k + rank].flat.size() == 512);
    }
  }
  CHECK(plan.buckets.back() == so::Range{10752, 12001});
}

TEST_CASE("The size of a bucket is in bytes of gradients, and at least one element", "[sharding][host]") {
  const Space space({100000});
  CHECK(so::FlatSharding{.bucket_bytes = 4096}.plan(space.view(), 1, 4).buckets[0].size() == 1024);
  CHECK(so::FlatSharding{.bucket_bytes = 4096}.plan(space.view(), 1, 2).buckets[0].size() == 2048);
  CHECK(so::FlatSharding{.bucket_bytes = 1}.plan(space.view(), 1, 4).buckets[0].size() == 256);
  CHECK_THROWS_AS(so::FlatSharding{.bucket_bytes = 0}.plan(space.view(), 1, 4), std::invalid_argument);
  CHECK_THROWS_AS(so::FlatSharding{.bucket_bytes = -5}.plan(Space({}).view(), 1, 4), std::invalid_argument);
}

TEST_CASE("FlatSharding plans spaces and buckets beyond 32 bits", "[sharding][host]") {
  const Space space({std::int64_t{7} << 32});
  const so::ShardPlan plan = so::FlatSharding{.bucket_bytes = std::int64_t{1} << 62}.plan(space.view(), 7, 4);
  REQUIRE(plan.runs.size() == 7);
  for (const auto& run : plan.runs) CHECK(run.flat.size() == std::int64_t{1} << 32);
}
