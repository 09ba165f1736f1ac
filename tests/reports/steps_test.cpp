// SPDX-License-Identifier: Apache-2.0
// What users of such systems reported about counters, skipped steps, precision and accumulation.
#include <catch2/catch_approx.hpp>
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <shardopt/collectives/solo.hpp>
#include <support/small_engine.hpp>

#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

using namespace test;
using Catch::Approx;

namespace {

using Bf16 = so::Mixed<so::bf16, so::bf16, float>;
using Fp16 = so::Mixed<so::fp16, so::fp16, float>;

template <class Rule, class Precision>
using SoloOptimizer = so::ZeroOptimizer<Rule, so::FlatSharding, so::Solo<so::Host>, Precision>;

/// Parameters on which the update works: masters where there are any.
template <class Optimizer>
double updated_value(const Engine<Optimizer>& engine) {
  const auto master = engine.state("master");
  return master.empty() ? engine.parameter(0) : static_cast<double>(master[0]);
}

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

}  // namespace

TEMPLATE_TEST_CASE("The step counter does not stop where a narrow type would", "[reports][B032][host]",
                   so::FullPrecision, Bf16, Fp16) {
  Engine<SoloOptimizer<so::Adam, TestType>> engine(
      table_of_sizes({3}), {.groups = {{"default", {.lr = 1e-3}}}}, so::Solo<so::Host>{});
  engine.fill_gradients(0.1);
  const auto gradients = engine.gradients;
  double before = 0;
  so::StepResult result;
  for (int step = 1; step <= 1000; ++step) {
    if (step == 1000) {
      before = updated_value(engine);
      // A parameter of 0 shows the update without the rounding of a sum.
      if (engine.state("master").empty()) {
        engine.parameters[0] = rounded<typename TestType::Param>(0.0);
      } else {
        engine.optimizer.state("master")[0] = 0;
      }
      before = 0;
    }
    engine.gradients = gradients;
    result = engine.step();
  }
  CHECK(result.iteration == 1000);
  CHECK(result.updates == 1000);
  CHECK(before - updated_value(engine) == Approx(1e-3).epsilon(1e-5));
}

TEMPLATE_TEST_CASE("The step counter of sharded ranks does not stop where a narrow type would",
                   "[reports][B032][host]", so::FullPrecision, Bf16, Fp16) {
  constexpr std::int64_t size = 3 * grain;
  struct Seen {
    std::int64_t iteration = 0, updates = 0;
    double step = 0;       ///< of this rank's first element, where it is updated
    double parameter = 0;  ///< of the last rank's, as this one has it
  };
  const auto seen = on_ranks(3, [&](HostThreads comm) {
    const int rank = comm.rank();
    Engine<ThreadsOptimizer<so::Adam, TestType>> engine(
        table_of_sizes({size}), {.groups = {{"default", {.lr = 1e-3}}}}, std::move(comm));
    Seen mine;
    for (int step = 1; step <= 1000; ++step) {
      engine.fill_gradients(0.1);
      if (step == 1000) {  // from 0 the update shows without the rounding of a sum
        for (auto& p : engine.parameters) p = rounded<typename TestType::Param>(0.0);
        for (float& master : engine.optimizer.state("master")) master = 0;
      }
      const auto result = engine.step({.gradient_scale = 1.0f / 3});
      mine.iteration = result.iteration;
      mine.updates = result.updates;
    }
    const auto master = engine.state("master");
    mine.step = master.empty() ? engine.parameter(rank * grain) : static_cast<double>(master[0]);
    mine.parameter = engine.parameter(size - 1);
    return mine;
  });
  for (const Seen& rank : seen) {
    CHECK(rank.iteration == 1000);
    CHECK(rank.updates == 1000);
    CHECK(rank.step == Approx(-1e-3).epsilon(1e-5));
    CHECK(rank.parameter == Approx(-1e-3).epsilon(0x1p-8));
  }
}

TEST_CASE("Betas close to one keep their distance from it on every rank", "[reports][B033][host]") {
  const double beta2 = GENERATE(0.999, 0.9999, 0.999999);
  CAPTURE(beta2);
  const auto seen = on_ranks(3, [&](HostThreads comm) {
    Engine<ThreadsOptimizer<so::Adam, Bf16>> engine(table_of_sizes({3 * grain - 7}),
                                                    {.groups = {{"default", {.lr = 0.5, .beta2 = beta2}}}},
                                                    std::move(comm));
    engine.fill_gradients(1);
    engine.step({.gradient_scale = 1.0f / 3});
    return std::vector<double>{static_cast<double>(engine.state("exp_avg_sq").back()),
                               static_cast<double>(engine.state("master").back()), engine.parameter(0)};
  });
  for (const auto& rank : seen) {
    CHECK(rank[0] == Approx(1 - beta2).epsilon(1e-5));
    CHECK(rank[1] == Approx(-0.5).epsilon(1e-6));
    CHECK(rank[2] == -0.5);
  }
}

TEST_CASE("Betas close to one keep their distance from it", "[reports][B033][host]") {
  struct Case {
    double beta2, square;
  };
  const auto c = GENERATE(Case{0.999, 1e-3}, Case{0.9999, 1e-4}, Case{0.999999, 1e-6});
  CAPTURE(c.beta2);
  Engine<SoloOptimizer<so::Adam, Bf16>> engine(
      table_of_sizes({3}), {.groups = {{"default", {.lr = 0.5, .beta2 = c.beta2}}}}, so::Solo<so::Host>{});
  engine.fill_gradients(1);
  engine.step();
  CHECK(engine.state("exp_avg_sq")[0] == Approx(c.square).epsilon(1e-6));
  CHECK(engine.state("master")[0] == Approx(-0.5).epsilon(1e-6));
}

TEST_CASE("A beta of 0.999999 is right after 100000 steps", "[reports][B033][host]") {
  Engine<SoloOptimizer<so::Adam, Bf16>> engine(
      table_of_sizes({1}), {.groups = {{"default", {.lr = 1e-6, .beta2 = 0.999999}}}}, so::Solo<so::Host>{});
  engine.fill_gradients(1);
  for (int step = 0; step < 99999; ++step) engine.optimizer.step({}, {});
  engine.optimizer.state("master")[0] = 0;
  engine.step();
  CHECK(engine.state("exp_avg_sq")[0] == Approx(0.0951626).epsilon(1e-4));
  CHECK(engine.state("master")[0] == Approx(-1e-6).epsilon(1e-4));
}

TEST_CASE("Epsilon stands outside the root after the bias correction", "[reports][B034][host]") {
  const auto run = [](auto engine_type) {
    typename decltype(engine_type)::type engine(
        table_of_sizes({9}), {.groups = {{"default", {.lr = 1, .eps = 1e-8, .weight_decay = 0}}}},
        so::Solo<so::Host>{});
    engine.fill_gradients(1e-8);
    engine.step();
    return engine.parameter(8);
  };
  CHECK(run(std::type_identity<Engine<SoloOptimizer<so::Adam, so::FullPrecision>>>{}) ==
        Approx(-0.5).epsilon(1e-5));
  CHECK(run(std::type_identity<Engine<SoloOptimizer<so::AdamW, so::FullPrecision>>>{}) ==
        Approx(-0.5).epsilon(1e-5));
}

TEST_CASE("AdamW decays apart from the moments, Adam through them", "[reports][B034][host]") {
  const auto run = [](auto rule, double gradient) {
    Engine<SoloOptimizer<decltype(rule), so::FullPrecision>> engine(
        table_of_sizes({9}), {.groups = {{"default", rule}}}, so::Solo<so::Host>{}, 1.0);
    engine.fill_gradients(gradient);
    engine.step();
    return std::vector<double>{engine.parameter(8), static_cast<double>(engine.state("exp_avg")[8]),
                               static_cast<double>(engine.state("exp_avg_sq")[8])};
  };
  const auto decoupled = run(so::AdamW{.lr = 0.1, .weight_decay = 0.1}, 0);
  CHECK(std::fabs(decoupled[0] - 0.99) <= 1e-7);
  CHECK(decoupled[1] == 0);
  CHECK(decoupled[2] == 0);
  const auto l2 = run(so::Adam{.lr = 0.1, .weight_decay = 0.1}, 0);
  CHECK(std::fabs(l2[0] - 0.9) <= 1.5e-7);
  CHECK(l2[1] == Approx(0.01).epsilon(1e-6));
  CHECK(l2[2] == Approx(1e-5).epsilon(1e-6));
  CHECK(std::fabs(run(so::AdamW{.lr = 0.1, .weight_decay = 0.1}, 1)[0] - 0.89) <= 1e-7);
  CHECK(std::fabs(run(so::Adam{.lr = 0.1, .weight_decay = 0.1}, 1)[0] - 0.9) <= 1e-7);
}

TEST_CASE("An infinity or NaN anywhere makes every rank skip the same step", "[reports][law7][B045][host]") {
  constexpr int world = 4;
  constexpr std::int64_t size = 16 * grain;
  const int bad_rank = GENERATE(0, 1, 2, 3);
  const double bad = GENERATE(infinity, -infinity, not_a_number);
  const bool only_after_summing = GENERATE(false, true);
  const float max_norm = GENERATE(1.0f, std::numeric_limits<float>::infinity());
  const bool scaled = GENERATE(false, true);
  CAPTURE(bad_rank, bad, only_after_summing, max_norm, scaled);
  const auto seen = on_ranks(world, [&](HostThreads comm) {
    const int rank = comm.rank();
    std::string wrong;
    ThreadsOptimizer<so::AdamW>::Config config{.max_norm = max_norm};
    if (scaled) config.loss_scale = so::DynamicLossScale{.initial = 1024};
    Engine<ThreadsOptimizer<so::AdamW>> engine(table_of_sizes({size}), config, std::move(comm), 0.5);
    const auto loss_scale_is = [&](float expected) {
      if (*engine.optimizer.loss_scale() != (scaled ? expected : 1.0f)) wrong += "loss scale ";
    };
    engine.fill_gradients(1);
    engine.step();
    loss_scale_is(1024);
    const auto parameters = engine.parameters;
    const auto first = engine.state("exp_avg");
    const auto second = engine.state("exp_avg_sq");

    // (a) In the raw gradient of one rank. (b) In the shard that a rank owns, where finite gradients add up
    // to it.
    engine.fill_gradients(1);
    if (!only_after_summing && rank == bad_rank)
      engine.gradients[static_cast<std::size_t>(noise(5, bad_rank) % size)] = static_cast<float>(bad);
    if (only_after_summing) {
      float& element = engine.gradients[static_cast<std::size_t>(bad_rank * 4 * grain + 17)];
      constexpr float large = 3e38f;
      if (std::isinf(bad)) element = bad > 0 ? large : -large;
      if (std::isnan(bad)) element = rank < 2 ? large : -large;
    }
    const so::StepResult skipped = engine.step();
    if (!skipped.skipped || skipped.non_finite < 1 || !std::isnan(skipped.norm)) wrong += "not skipped ";
    if (skipped.iteration != 2 || skipped.updates != 1) wrong += "counters ";
    if (engine.parameters != parameters) wrong += "parameters ";
    if (engine.state("exp_avg") != first || engine.state("exp_avg_sq") != second) wrong += "moments ";
    loss_scale_is(512);  // halved once

    engine.fill_gradients(1);
    const so::StepResult next = engine.step();
    if (next.skipped || next.updates != 2 || next.iteration != 3 || engine.parameters == parameters)
      wrong += "next step ";
    loss_scale_is(512);
    return wrong;
  });
  for (const std::string& wrong : seen) CHECK(wrong == "");
}

TEST_CASE("bf16 gradients are checked without loss scaling, and skipped steps are seen",
          "[reports][B048][host]") {
  struct Seen {
    double parameter = 0, master = 0;
    int skipped = 0;
    so::StepResult last;
  };
  class Watcher : public so::Observer {
   public:
    void step_skipped(const so::StepResult&) override { ++count; }
    int count = 0;
  };
  const bool count_skipped = GENERATE(false, true);
  const auto seen = on_ranks(2, [&](HostThreads comm) {
    const int rank = comm.rank();
    Watcher watcher;
    Engine<ThreadsOptimizer<so::SGD, Bf16>> engine(
        table_of_sizes({2 * grain}),
        {.groups = {{"default", {.lr = 0.1}}}, .count_skipped_updates = count_skipped, .observer = &watcher},
        std::move(comm));
    Seen mine;
    for (int step = 1; step <= 4; ++step) {
      engine.fill_gradients(0.5);
      if (step == 2 && rank == 1) engine.gradients[3] = rounded<so::bf16>(infinity);
      mine.last = engine.step();
      mine.skipped += mine.last.skipped ? 1 : 0;
    }
    mine.parameter = engine.parameter(3);
    mine.master = static_cast<double>(engine.state("master")[3]);
    if (watcher.count != mine.skipped) mine.skipped = -1;
    return mine;
  });
  for (const Seen& rank : seen) {
    CHECK(rank.parameter == -0.30078125);
    CHECK(rank.master == Approx(-0.3).epsilon(1e-6));
    CHECK(rank.skipped == 1);
    CHECK(rank.last.iteration == 4);
    CHECK(rank.last.updates == (count_skipped ? 4 : 3));
  }
}

TEST_CASE("With the check off a non-finite gradient goes where the rule takes it", "[reports][B048][host]") {
  const auto seen = on_ranks(2, [](HostThreads comm) {
    Engine<ThreadsOptimizer<so::SGD, Bf16>> engine(
        table_of_sizes({2 * grain}),
        {.groups = {{"default", {.lr = 1}}}, .max_norm = 1, .non_finite = so::NonFinite::propagate},
        std::move(comm));
    engine.fill_gradients(0.5);
    engine.gradients[7] = rounded<so::bf16>(infinity);
    const auto result = engine.step();
    return std::vector<double>{engine.parameter(7), engine.parameter(8), result.skipped ? 1.0 : 0.0,
                               static_cast<double>(result.non_finite), result.norm};
  });
  for (const auto& rank : seen) {
    CHECK(rank[0] == -infinity);
    CHECK(rank[1] == -1);
    CHECK(rank[2] == 0);
    CHECK(rank[3] == 1);
    CHECK(std::isnan(rank[4]));
  }
}

TEST_CASE("Large finite gradients are no overflow, though their sum is", "[reports][B049][host]") {
  const auto step = [](auto precision, std::int64_t size, double gradient, float max_norm,
                       double lr = 1e-38) {
    return on_ranks(2, [&](HostThreads comm) {
      const int rank = comm.rank();
      Engine<ThreadsOptimizer<so::SGD, decltype(precision)>> engine(
          table_of_sizes({size}), {.groups = {{"default", {.lr = lr}}}, .max_norm = max_norm},
          std::move(comm));
      engine.fill_gradients(rank == 0 ? gradient : 0);
      const auto result = engine.step();
      return std::vector<double>{result.skipped ? 1.0 : 0.0, result.norm, engine.parameter(0)};
    });
  };
  constexpr float off = std::numeric_limits<float>::infinity();
  for (const auto& rank : step(Fp16{}, 100, 60000, off)) CHECK(rank[0] == 0);
  for (const auto& rank : step(so::FullPrecision{}, 2, 3e38, off)) {
    CHECK(rank[0] == 0);
    CHECK(rank[2] == Approx(-3).epsilon(1e-5));
  }
  // The norm exceeds a float; it is a double, and the clipped gradient is what it should be.
  const auto clipped = step(so::FullPrecision{}, 2, 3e38, 1, 1);
  for (const auto& rank : clipped) {
    CHECK(rank[0] == 0);
    CHECK(rank[1] == Approx(4.2426406871192854e38).epsilon(1e-6));
    CHECK(rank[2] == Approx(-0.70710678118654752).epsilon(1e-6));
    CHECK(rank == clipped[0]);
  }
}

TEST_CASE("Small contributions survive accumulation and reduction with fp32 gradients",
          "[reports][B053][host]") {
  using Bf16Fp32 = so::Mixed<so::bf16, float, float>;
  Engine<SoloOptimizer<so::SGD, Bf16Fp32>> alone(table_of_sizes({5}), {.groups = {{"default", {.lr = 1}}}},
                                                 so::Solo<so::Host>{});
  for (int k = 0; k <= 256; ++k) {
    for (float& g : alone.gradients) g += k == 0 ? 1.0f : 0x1p-9f;
  }
  alone.step();
  CHECK(alone.state("master") == std::vector<float>(5, -1.5f));
  CHECK(alone.parameter(0) == -1.5);

  const auto averages = on_ranks(8, [](HostThreads comm) {
    const int rank = comm.rank();
    Engine<ThreadsOptimizer<so::SGD, so::FullPrecision>> engine(
        table_of_sizes({5}), {.groups = {{"default", {.lr = 1}}}}, std::move(comm));
    engine.fill_gradients(rank == 0 ? 256 : 1);
    engine.step({.gradient_scale = 0.125f});
    return engine.values();
  });
  for (const auto& rank : averages) CHECK(rank == std::vector<double>(5, -32.875));

  // Seven contributions that are each lost beside the first in bf16: the sum is rounded, not the addends.
  const auto small = [](auto precision) {
    return on_ranks(8, [](HostThreads comm) {
      const int rank = comm.rank();
      Engine<ThreadsOptimizer<so::SGD, decltype(precision)>> engine(
          table_of_sizes({5}), {.groups = {{"default", {.lr = 1}}}}, std::move(comm));
      engine.fill_gradients(rank == 0 ? 1 : 0x1p-9);
      engine.step();
      return std::vector<double>{engine.parameter(4), engine.gradient(4)};
    });
  };
  for (const auto& rank : small(so::FullPrecision{})) CHECK(rank[0] == -(1 + 7 * 0x1p-9));
  for (const auto& rank : small(Bf16Fp32{})) CHECK(rank[0] == -(1 + 0x1p-6));
  for (const auto& rank : small(Bf16{})) CHECK(rank[0] == -(1 + 0x1p-6));
  CHECK(small(Bf16Fp32{})[0][1] == 1 + 7 * 0x1p-9);

  // What 16-bit gradients can hold of 263, rounded once.
  const auto rounded_once = on_ranks(8, [](HostThreads comm) {
    const int rank = comm.rank();
    Engine<ThreadsOptimizer<so::SGD, Bf16>> engine(table_of_sizes({5}), {.groups = {{"default", {.lr = 1}}}},
                                                   std::move(comm));
    engine.fill_gradients(rank == 0 ? 256 : 1);
    engine.step({.gradient_scale = 0.125f});
    return engine.values();
  });
  for (const auto& rank : rounded_once) CHECK(rank == std::vector<double>(5, -33.0));
}

TEMPLATE_TEST_CASE("Replicas stay equal in every parameter, whatever kind it is", "[reports][B056][host]",
                   so::FullPrecision, Bf16) {
  using Param = typename TestType::Param;
  const auto table = packed_table({{"owned", {5 * grain}},
                                   {"empty", {0}},
                                   {"one", {1}},
                                   {"frozen", {7}, "default", true},
                                   {"tied", {1}, "default", false, "one"},
                                   {"last", {3}}});
  const auto hashes = on_ranks(3, [&](HostThreads comm) {
    const int rank = comm.rank();
    Engine<ThreadsOptimizer<so::AdamW, TestType>> engine(
        table, {.groups = {{"default", {.lr = 0.1}}}, .initial_parameters = so::InitialParameters::broadcast},
        std::move(comm), rank);
    std::vector<std::uint64_t> mine;
    std::string wrong;
    for (int step = 0; step <= 5; ++step) {
      const auto before = engine.values();
      engine.set_gradients(
          [&](std::int64_t i) { return static_cast<double>(noise(51, step, rank, i) % 100) / 100 + 0.5; });
      if (step > 0) engine.step();
      engine.optimizer.verify_parameters({});
      std::uint64_t hash = 0;
      for (const Param p : engine.parameters) hash = noise(hash, bits_of(p));
      mine.push_back(hash);
      const auto after = engine.values();
      if (step == 0 && after != std::vector<double>(after.size(), 0.0)) wrong += "not rank 0's; ";
      for (std::size_t i = 0; i < after.size(); ++i) {
        const bool still = step == 0 || (i > 5 * grain && i <= 5 * grain + 7);
        if (step > 0 && (after[i] == before[i]) != still) wrong += "element " + std::to_string(i) + "; ";
      }
    }
    return std::pair(mine, wrong);
  });
  for (const auto& [mine, wrong] : hashes) {
    CHECK(wrong == "");
    CHECK(mine == hashes[0].first);
  }
  // Each step moves: an update that never ran would leave equal replicas, too.
  const auto& first = hashes[0].first;
  CHECK(std::set<std::uint64_t>(first.begin(), first.end()).size() == 6);
  const auto refused = messages_of_ranks<so::CollectiveError>(3, [&](HostThreads comm) {
    const int rank = comm.rank();
    Engine<ThreadsOptimizer<so::AdamW, TestType>> engine(table, {}, std::move(comm), rank);
  });
  for (const auto& message : refused)
    CHECK(message.find("ranks hold different values of parameter 'owned'") != std::string::npos);
}

TEST_CASE("Every micro-batch of a window counts once", "[reports][B057][host]") {
  const auto values = on_ranks(2, [](HostThreads comm) {
    const int rank = comm.rank();
    Engine<ThreadsOptimizer<so::SGD>> engine(table_of_sizes({600}), {.groups = {{"default", {.lr = 1}}}},
                                             std::move(comm));
    for (int k = 0; k < 4; ++k) {
      for (float& g : engine.gradients) g += static_cast<float>((rank + 1) * (k + 1));
      if (k == 3) engine.optimizer.gradient_ready(so::ParameterId{0}, {});
    }
    engine.step({.gradient_scale = 1.0f / (4 * 2)});
    return engine.values();
  });
  for (const auto& rank : values) CHECK(rank == std::vector<double>(600, -3.75));
}

TEST_CASE("A shorter last window is divided by its own length", "[reports][B058][host]") {
  const auto train = [](const std::vector<int>& windows) {
    const auto values = on_ranks(2, [&](HostThreads comm) {
      Engine<ThreadsOptimizer<so::SGD>> engine(table_of_sizes({600}), {.groups = {{"default", {.lr = 1}}}},
                                               std::move(comm));
      for (const int batches : windows) {
        engine.optimizer.zero_gradients({});
        for (int k = 0; k < batches; ++k) {
          for (float& g : engine.gradients) g += 1;
        }
        engine.step({.gradient_scale = 1.0f / static_cast<float>(2 * batches)});
      }
      return engine.values();
    });
    REQUIRE(all_same(values));
    return values[0];
  };
  CHECK(train({4, 4, 2}) == std::vector<double>(600, -3.0));
  CHECK(train({3})[0] == Approx(-1).epsilon(1e-6));
}
