// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_test_macros.hpp>
#include <shardopt/sharding/shard_plan.hpp>

#include <vector>

namespace so = shardopt;

TEST_CASE("reduced() lists a rank's runs in flat order, and the ranks' lists are disjoint",
          "[sharding][host]") {
  const so::ShardPlan plan{.buckets = {{0, 1024}},
                           .runs = {{{0, 256}, 1}, {{256, 512}, 0}, {{512, 1024}, 1}}};
  CHECK(plan.reduced(0) == std::vector<so::Range>{{256, 512}});
  CHECK(plan.reduced(1) == std::vector<so::Range>{{0, 256}, {512, 1024}});
  CHECK(plan.reduced(2).empty());
  CHECK(plan.reduced_elements(0) == 256);
  CHECK(plan.reduced_elements(1) == 768);
  CHECK(plan.reduced_elements(2) == 0);
}

TEST_CASE("A tensor's end is the next one's begin, or the end of the space", "[sharding][host]") {
  const std::vector<std::int64_t> begins{0, 5, 300};
  const so::FlatSpace space{700, begins};
  CHECK(space.end_of(0) == 5);
  CHECK(space.end_of(1) == 300);
  CHECK(space.end_of(2) == 700);
}
