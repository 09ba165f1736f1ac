// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_test_macros.hpp>
#include <shardopt/sharding/flat_sharding.hpp>
#include <shardopt/sharding/per_parameter_sharding.hpp>
#include <shardopt/sharding/replicated.hpp>
#include <shardopt/sharding/sharding_policy.hpp>
#include <support/plans.hpp>
#include <support/small_engine.hpp>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

using namespace test;

namespace {

/// The least that models ShardingPolicy.
struct Minimal {
  static constexpr std::string_view name = "minimal";
  static constexpr bool updates_everything = false;
  [[nodiscard]] so::ShardPlan plan(const so::FlatSpace& space, int, std::int64_t) const {
    if (space.elements == 0) return {};
    return {.buckets = {{0, space.elements}}, .runs = {{{0, space.elements}, 0}}};
  }
};
static_assert(so::ShardingPolicy<Minimal>);

struct WithoutName {
  static constexpr bool updates_everything = false;
  [[nodiscard]] so::ShardPlan plan(const so::FlatSpace&, int, std::int64_t) const { return {}; }
};
static_assert(!so::ShardingPolicy<WithoutName>);

struct WithoutUpdatesEverything {
  static constexpr std::string_view name = "x";
  [[nodiscard]] so::ShardPlan plan(const so::FlatSpace&, int, std::int64_t) const { return {}; }
};
static_assert(!so::ShardingPolicy<WithoutUpdatesEverything>);

struct DecidesAtRunTime {
  bool updates_everything = false;
  static constexpr std::string_view name = "x";
  [[nodiscard]] so::ShardPlan plan(const so::FlatSpace&, int, std::int64_t) const { return {}; }
};
static_assert(!so::ShardingPolicy<DecidesAtRunTime>);

struct WithoutPlan {
  static constexpr std::string_view name = "x";
  static constexpr bool updates_everything = false;
};
static_assert(!so::ShardingPolicy<WithoutPlan>);

struct PlanIsNotConst {
  static constexpr std::string_view name = "x";
  static constexpr bool updates_everything = false;
  [[nodiscard]] so::ShardPlan plan(const so::FlatSpace&, int, std::int64_t) { return {}; }
};
static_assert(!so::ShardingPolicy<PlanIsNotConst>);

struct PlanOfAnotherKind {
  static constexpr std::string_view name = "x";
  static constexpr bool updates_everything = false;
  [[nodiscard]] std::vector<so::Range> plan(const so::FlatSpace&, int, std::int64_t) const { return {}; }
};
static_assert(!so::ShardingPolicy<PlanOfAnotherKind>);

struct NotTriviallyCopyable : Minimal {
  std::vector<int> more;
};
static_assert(!so::ShardingPolicy<NotTriviallyCopyable>);

class NoAggregate {
 public:
  static constexpr std::string_view name = "x";
  static constexpr bool updates_everything = false;
  [[nodiscard]] so::ShardPlan plan(const so::FlatSpace&, int, std::int64_t) const { return {}; }

 private:
  [[maybe_unused]] int hidden_ = 0;
};
static_assert(!so::ShardingPolicy<NoAggregate>);

static_assert(!so::ShardingPolicy<int>);

/// A policy that breaks its contract in a way of choice.
struct Careless {
  int fault = 0;

  static constexpr std::string_view name = "careless";
  static constexpr bool updates_everything = false;
  [[nodiscard]] so::ShardPlan plan(const so::FlatSpace& space, int world, std::int64_t) const {
    const std::int64_t n = space.elements;
    switch (fault) {
      case 1:
        return {.buckets = {{0, n}}, .runs = {{{0, 256}, 0}, {{512, n}, 0}}};
      case 2:
        return {.buckets = {{0, n}}, .runs = {{{0, 512}, 0}, {{256, n}, 0}}};
      case 3:
        return {.buckets = {{0, n}}, .runs = {{{0, 100}, 0}, {{100, n}, 0}}};
      case 4:
        return {.buckets = {{0, n}}, .runs = {{{0, n}, world}}};
      case 5:
        return {.buckets = {{0, n}}, .runs = {{{0, n}, -1}}};
      case 6:
        return {.buckets = {{0, 256}}, .runs = {{{0, n}, 0}}};
      case 7:
        return {.buckets = {{0, 100}, {100, n}}, .runs = {{{0, n}, 0}}};
      case 8:
        return {.buckets = {{0, n}}, .runs = {{{0, 256}, 0}, {{256, 256}, 0}, {{256, n}, 0}}};
      case 9:
        return {.buckets = {{0, n}}, .runs = {{{0, n - 256}, 0}}};
      case 10:
        return {};
      default:
        return {.buckets = {{0, n}}, .runs = {{{0, n}, 0}}};
    }
  }
};

}  // namespace

TEST_CASE("The least policy trains, with all state on one rank", "[sharding][host]") {
  const auto states = on_ranks(3, [](HostThreads comm) {
    Engine<ThreadsOptimizer<so::AdamW, so::FullPrecision, Minimal>> engine(table_of_sizes({1000, 3}), {},
                                                                           std::move(comm), 1.0);
    engine.fill_gradients(1);
    engine.step();
    engine.optimizer.verify_parameters({});
    return std::pair(engine.state("exp_avg").size(), engine.parameter(1002));
  });
  CHECK(states[0].first == 1003);
  CHECK(states[1].first == 0);
  CHECK(states[2].first == 0);
  for (const auto& rank : states) CHECK(rank.second < 1);
}

TEST_CASE("A policy that breaks its contract is refused with what it broke", "[sharding][host]") {
  const auto refusal = [](int fault) {
    return message_of<std::invalid_argument>([&] {
      static_cast<void>(ThreadsOptimizer<so::AdamW, so::FullPrecision, Careless>::plan(
          table_of_sizes({1024}), {.sharding = {fault}}, {.rank = 0, .world = 2}));
    });
  };
  CHECK(refusal(0) == "");
  CHECK(refusal(1).find("owned runs must be consecutive and not empty; after element 256 comes 512..1024") !=
        std::string::npos);
  CHECK(refusal(2).find("after element 512 comes 256..1024") != std::string::npos);
  CHECK(refusal(3).find("cuts its owned runs at flat element 100") != std::string::npos);
  CHECK(refusal(4).find("names rank 2 as owner; there are 2") != std::string::npos);
  CHECK(refusal(5).find("names rank -1 as owner") != std::string::npos);
  CHECK(refusal(6).find("buckets end at 256 of 1024") != std::string::npos);
  CHECK(refusal(7).find("cuts its buckets at flat element 100") != std::string::npos);
  CHECK(refusal(8).find("not empty") != std::string::npos);
  CHECK(refusal(9).find("owned runs end at 768 of 1024") != std::string::npos);
  CHECK(refusal(10).find("buckets end at 0") != std::string::npos);
}
