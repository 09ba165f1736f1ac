// SPDX-License-Identifier: Apache-2.0
// What users of such systems reported about types that only a few lines of a program know.
#include <catch2/catch_test_macros.hpp>
#include <support/small_engine.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

using namespace test;

namespace {

/// Trains by a rule and with a policy that nobody else may name.
class Secretive {
  struct Halve {
    double lr = 1;
    template <class V>
    struct State {
      V visits;
    };
    struct Constants {
      float negative_lr;
    };
    [[nodiscard]] SHARDOPT_HD Constants constants(so::StepScalars s) const {
      return {so::math::neg(so::math::mul(static_cast<float>(lr), s.lr_factor))};
    }
    template <class V>
    [[nodiscard]] SHARDOPT_RULE static V update(Constants c, V param, V grad, State<V>& state) {
      state.visits = so::math::add(state.visits, V(1.0f));
      return so::math::fma(c.negative_lr, grad, so::math::mul(V(0.5f), param));
    }
  };
  struct Last {
    static constexpr std::string_view name = "last";
    static constexpr bool updates_everything = false;
    [[nodiscard]] so::ShardPlan plan(const so::FlatSpace& space, int world, std::int64_t) const {
      return {.buckets = {{0, space.elements}}, .runs = {{{0, space.elements}, world - 1}}};
    }
  };

 public:
  [[nodiscard]] static std::vector<double> train(HostThreads comm) {
    Engine<ThreadsOptimizer<Halve, so::FullPrecision, Last>> engine(table_of_sizes({300}), {},
                                                                    std::move(comm), 4.0);
    engine.fill_gradients(0.5);
    engine.step();
    return engine.values();
  }
};

/// Gives each grain to the rank that a function names.
template <class Owner>
struct DealtBy {
  static constexpr std::string_view name = "dealt by a function";
  static constexpr bool updates_everything = false;
  [[nodiscard]] so::ShardPlan plan(const so::FlatSpace& space, int world, std::int64_t) const {
    so::ShardPlan plan{.buckets = {{0, space.elements}}, .runs = {}};
    for (std::int64_t at = 0; at < space.elements; at += grain)
      plan.runs.push_back({{at, std::min(at + grain, space.elements)}, Owner{}(at / grain, world)});
    return plan;
  }
};

template <class Sharding>
std::vector<std::vector<double>> trained_by() {
  return on_ranks(3, [](HostThreads comm) {
    Engine<ThreadsOptimizer<so::SGD, so::FullPrecision, Sharding>> engine(
        table_of_sizes({5 * grain + 1}), {.groups = {{"default", {.lr = 1}}}}, std::move(comm));
    engine.fill_gradients(0.5);
    engine.step();
    auto result = engine.values();
    result.push_back(static_cast<double>(engine.optimizer.memory_plan().owned_parameters));
    return result;
  });
}

}  // namespace

TEST_CASE("Rules and policies may be private members of a class", "[reports][B098][host]") {
  for (const auto& rank : on_ranks(2, [](HostThreads comm) { return Secretive::train(std::move(comm)); }))
    CHECK(rank == std::vector<double>(300, 1.0));
}

TEST_CASE("Policies may be known to one function only, and be made of a lambda", "[reports][B098][host]") {
  struct Local {
    int operator()(std::int64_t index, int world) const { return static_cast<int>((index + 1) % world); }
  };
  const auto reversed = [](std::int64_t index, int world) { return static_cast<int>((5 - index) % world); };
  const auto by_local = trained_by<DealtBy<Local>>();
  const auto by_lambda = trained_by<DealtBy<decltype(reversed)>>();
  for (const auto* ranks : {&by_local, &by_lambda}) {
    for (const auto& rank : *ranks) {
      for (std::size_t i = 0; i + 1 < rank.size(); ++i) REQUIRE(rank[i] == -1.5);
    }
  }
  CHECK(by_local[0].back() == 257);  // grains 2 and 5, the last of which holds one element
  CHECK(by_lambda[0].back() == 257);
  CHECK(by_local[1].back() == 512);
}
