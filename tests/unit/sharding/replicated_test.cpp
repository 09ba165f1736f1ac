// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_test_macros.hpp>
#include <shardopt/sharding/replicated.hpp>
#include <support/plans.hpp>

#include <stdexcept>

using namespace test;

TEST_CASE("Replicated reduces as FlatSharding does, and updates everything everywhere", "[sharding][host]") {
  STATIC_REQUIRE(so::Replicated::updates_everything);
  for (const Space& space : spaces()) {
    const auto plan = so::Replicated{.bucket_bytes = 4096}.plan(space.view(), 3, 2);
    const auto flat = so::FlatSharding{.bucket_bytes = 4096}.plan(space.view(), 3, 2);
    CHECK(plan.buckets == flat.buckets);
    CHECK(plan.runs == flat.runs);
  }
  CHECK_THROWS_AS(so::Replicated{.bucket_bytes = 0}.plan(Space({1}).view(), 3, 2), std::invalid_argument);
}
