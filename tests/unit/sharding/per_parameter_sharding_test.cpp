// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>
#include <shardopt/sharding/per_parameter_sharding.hpp>
#include <support/plans.hpp>

#include <algorithm>
#include <cstdint>
#include <set>
#include <stdexcept>
#include <vector>

using namespace test;

namespace {

/// Elements of one tensor that each rank owns.
std::vector<std::int64_t> shares(const so::ShardPlan& plan, so::Range tensor, int world) {
  std::vector<std::int64_t> result(static_cast<std::size_t>(world), 0);
  for (const auto& run : plan.runs)
    result[static_cast<std::size_t>(run.owner)] += so::intersection(run.flat, tensor).size();
  return result;
}

}  // namespace

TEST_CASE("PerParameterSharding covers every space, and cuts each tensor into one run a rank",
          "[sharding][host]") {
  const int world = GENERATE(range(1, 9));
  const std::int64_t bytes = GENERATE(1, 4096, 1 << 25);
  for (const Space& space : spaces()) {
    CAPTURE(world, bytes, space.elements);
    const so::ShardPlan plan = so::PerParameterSharding{.bucket_bytes = bytes}.plan(space.view(), world, 4);
    REQUIRE(broken(space, plan, world) == "");
    for (std::size_t k = 0; k < space.begins.size(); ++k) {
      const so::Range tensor{space.begins[k], space.view().end_of(k)};
      const std::int64_t grains = (tensor.end + 255) / 256 - tensor.begin / 256;
      if (grains < world) continue;
      const auto each = shares(plan, tensor, world);
      // Near-equal: by a grain, and what the tensor's ends lack of one.
      CHECK(*std::max_element(each.begin(), each.end()) - *std::min_element(each.begin(), each.end()) <
            3 * 256);
      std::int64_t runs = 0;
      for (const auto& run : plan.runs) runs += so::intersection(run.flat, tensor).empty() ? 0 : 1;
      CHECK(runs == world);
    }
  }
}

TEST_CASE("Small tensors go grain by grain to the rank that owns least, the lowest on ties",
          "[sharding][host]") {
  // Each of the first grains is whole, so the ranks take turns; the short one comes to rank 3, which then
  // owns least.
  const Space space({256, 512, 56, 200, 256});
  const so::ShardPlan plan = so::PerParameterSharding{}.plan(space.view(), 4, 4);
  std::vector<int> owners;
  for (const auto& run : plan.runs) owners.push_back(run.owner);
  CHECK(owners == std::vector<int>{0, 1, 2, 3, 3, 0});
}

TEST_CASE("Many small tensors leave no rank without work", "[sharding][host]") {
  const int world = GENERATE(2, 3, 8);
  const Space space(std::vector<std::int64_t>(100, 30));
  const so::ShardPlan plan = so::PerParameterSharding{}.plan(space.view(), world, 4);
  std::int64_t least = space.elements;
  std::int64_t most = 0;
  for (int rank = 0; rank < world; ++rank) {
    least = std::min(least, plan.reduced_elements(rank));
    most = std::max(most, plan.reduced_elements(rank));
  }
  CHECK(most - least <= 30);
}

TEST_CASE("The extra grains of large tensors do not pile up on the first ranks", "[sharding][host]") {
  const Space space(std::vector<std::int64_t>(16, 5 * 256));
  const so::ShardPlan plan = so::PerParameterSharding{}.plan(space.view(), 4, 4);
  for (int rank = 0; rank < 4; ++rank) CHECK(plan.reduced_elements(rank) == 20 * 256);
}

TEST_CASE("A bucket of PerParameterSharding is as many whole tensors as fit, at least one",
          "[sharding][host]") {
  const Space space({100, 200, 5000, 300, 300, 300});
  const so::ShardPlan plan = so::PerParameterSharding{.bucket_bytes = 2500}.plan(space.view(), 2, 4);
  CHECK(plan.buckets == std::vector<so::Range>{{0, 300}, {300, 5300}, {5300, 5900}, {5900, 6200}});
  CHECK_THROWS_AS(so::PerParameterSharding{.bucket_bytes = 0}.plan(space.view(), 2, 4),
                  std::invalid_argument);
}
