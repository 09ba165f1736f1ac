// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <shardopt/zero/loss_scale.hpp>
#include <support/small_engine.hpp>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

using namespace test;

namespace {

using Fp16 = so::Mixed<so::fp16, so::fp16, float>;
using Optimizer = ThreadsOptimizer<so::SGD, Fp16>;

Optimizer::Config config_with(const so::DynamicLossScale& scale) {
  return {.groups = {{"default", {.lr = 1}}}, .loss_scale = scale};
}

/// One step of an engine that scales its loss: the true gradient is 2^-10 a rank. @param overflows  on this
/// rank, or -1
so::StepResult scaled_step(Engine<Optimizer>& engine, int overflows = -1) {
  const bool bad = engine.optimizer.rank() == overflows;
  engine.fill_gradients(bad ? std::numeric_limits<double>::infinity()
                            : 0x1p-10 * static_cast<double>(*engine.optimizer.loss_scale()));
  return engine.step({.gradient_scale = 0.25f});
}

}  // namespace

TEST_CASE("An overflow on any rank halves the loss scale once, equally on all, and the next step is right",
          "[zero][law7][B045][host]") {
  const int bad = GENERATE(0, 1, 2, 3);
  const auto seen = on_ranks(4, [&](HostThreads comm) {
    Engine<Optimizer> engine(table_of_sizes({4 * grain}), config_with({.initial = 4096}), std::move(comm));
    std::vector<double> mine;
    for (const int overflows : {-1, bad, -1}) {
      const auto result = scaled_step(engine, overflows);
      mine.push_back(static_cast<double>(result.loss_scale));  // of this step
      mine.push_back(static_cast<double>(*engine.optimizer.loss_scale()));
      mine.push_back(engine.parameter(700) * 0x1p10);
      mine.push_back(static_cast<double>(result.updates));
    }
    return mine;
  });
  for (const auto& mine : seen)
    CHECK(mine == std::vector<double>{4096, 4096, -1, 1, 4096, 2048, -1, 1, 2048, 2048, -2, 2});
}

TEST_CASE("The norm and clipping do not see the loss scale", "[zero][B044][host]") {
  const float initial = GENERATE(1.0f, 1024.0f, 8192.0f);
  const auto norms = on_ranks(2, [&](HostThreads comm) {
    auto config = config_with({.initial = initial});
    config.max_norm = 1;
    Engine<Optimizer> engine(table_of_sizes({grain, grain}), config, std::move(comm));
    const double scale = static_cast<double>(*engine.optimizer.loss_scale());
    engine.set_gradients([&](std::int64_t i) { return i == 0 ? 1.5 * scale : i == grain ? 2 * scale : 0; });
    const auto result = engine.step();
    return std::vector<double>{result.norm, static_cast<double>(engine.state("master").at(0)),
                               engine.parameter(0), engine.parameter(grain), engine.parameter(1)};
  });
  for (const auto& rank : norms) {
    CHECK(rank[0] == 5);
    CHECK(std::abs(rank[2] + 0.6) <= 0x1p-11);  // what fp16 holds of them
    CHECK(std::abs(rank[3] + 0.8) <= 0x1p-11);
    CHECK(rank[4] == 0);
  }
  CHECK(std::abs(norms[0][1] + 0.6) <= 1e-6);
  CHECK(std::abs(norms[1][1] + 0.8) <= 1e-6);
}

TEST_CASE("The loss scale falls to 256 by overflows and grows after ten good steps", "[zero][host]") {
  const auto scales = on_ranks(2, [](HostThreads comm) {
    Engine<Optimizer> engine(table_of_sizes({8}), config_with({.initial = 65536, .growth_interval = 10}),
                             std::move(comm));
    std::vector<float> seen;
    for (int k = 0; k < 8; ++k) scaled_step(engine, 0);
    seen.push_back(*engine.optimizer.loss_scale());
    for (int k = 0; k < 9; ++k) scaled_step(engine);
    seen.push_back(*engine.optimizer.loss_scale());
    scaled_step(engine);
    seen.push_back(*engine.optimizer.loss_scale());
    for (int k = 0; k < 9; ++k) scaled_step(engine);
    scaled_step(engine, 1);  // the good steps start again
    for (int k = 0; k < 9; ++k) scaled_step(engine);
    seen.push_back(*engine.optimizer.loss_scale());
    return seen;
  });
  for (const auto& seen : scales) CHECK(seen == std::vector<float>{256, 256, 512, 256});
}

TEST_CASE("Hysteresis forgives overflows until it is used up, and is refilled by growth", "[zero][host]") {
  const auto scales = on_ranks(2, [](HostThreads comm) {
    Engine<Optimizer> engine(table_of_sizes({8}),
                             config_with({.initial = 1024, .growth_interval = 2, .hysteresis = 2}),
                             std::move(comm));
    std::vector<float> seen;
    for (const bool good : {false, false, false, true, true, false, false}) {
      scaled_step(engine, good ? -1 : 0);
      seen.push_back(*engine.optimizer.loss_scale());
    }
    return seen;
  });
  for (const auto& seen : scales) CHECK(seen == std::vector<float>{1024, 512, 256, 256, 512, 512, 256});
}

TEST_CASE("A loss scale stays at its minimum, and a step skipped there is an error of its ticket",
          "[zero][host]") {
  struct Counting : so::Observer {
    int skipped = 0;
    void step_skipped(const so::StepResult&) override { ++skipped; }
  };
  const auto seen = on_ranks(2, [](HostThreads comm) {
    Counting observer;
    auto config = config_with({.initial = 4, .minimum = 3});
    config.observer = &observer;
    Engine<Optimizer> engine(table_of_sizes({8}), config, std::move(comm));
    std::vector<std::string> mine;
    for (int k = 0; k < 3; ++k) mine.push_back(message_of<so::Error>([&] { scaled_step(engine, 0); }));
    mine.push_back(std::to_string(*engine.optimizer.loss_scale()));
    mine.push_back(message_of([&] { scaled_step(engine); }));
    mine.push_back(std::to_string(observer.skipped));
    return mine;
  });
  for (const auto& mine : seen) {
    CHECK(mine[0] == "");
    CHECK(mine[5] == "3");  // the observer is told of those, too
    CHECK(mine[1].find("at the smallest loss scale, 3.0") != std::string::npos);
    CHECK(mine[2].find("iteration 3") != std::string::npos);
    CHECK(mine[3] == "3.000000");
    CHECK(mine[4] == "");
  }
}

TEST_CASE("A loss scale never grows beyond what a float holds", "[zero][host]") {
  const auto scales = on_ranks(2, [](HostThreads comm) {
    Engine<Optimizer> engine(table_of_sizes({8}), config_with({.initial = 0x1p127f, .growth_interval = 1}),
                             std::move(comm));
    engine.step();
    return *engine.optimizer.loss_scale();
  });
  CHECK(scales == std::vector<float>{0x1p127f, 0x1p127f});
}

TEST_CASE("A step that the engine discards moves no loss scale", "[zero][host]") {
  const auto scales = on_ranks(2, [](HostThreads comm) {
    Engine<Optimizer> engine(table_of_sizes({8}), config_with({.initial = 1024, .growth_interval = 1}),
                             std::move(comm));
    engine.optimizer.reduce({}, {});
    engine.optimizer.discard({});
    return *engine.optimizer.loss_scale();
  });
  CHECK(scales == std::vector<float>{1024, 1024});
}

TEST_CASE("An overflow that the engine discards lowers the loss scale all the same", "[zero][host]") {
  const auto scales = on_ranks(2, [](HostThreads comm) {
    const bool bad = comm.rank() == 1;
    Engine<Optimizer> engine(table_of_sizes({8}), config_with({.initial = 1024}), std::move(comm));
    engine.fill_gradients(bad ? std::numeric_limits<double>::infinity() : 1);
    engine.optimizer.reduce({}, {});
    const auto result = engine.optimizer.discard({}).get();
    return std::vector<float>{*engine.optimizer.loss_scale(), result.loss_scale,
                              result.skipped ? 1.0f : 0.0f};
  });
  for (const auto& scale : scales) CHECK(scale == std::vector<float>{512, 1024, 1});
}

TEST_CASE("A loss scale out of range is refused with the field's name", "[zero][law9][host]") {
  const auto refusal = [](const so::DynamicLossScale& scale) {
    return message_of<std::invalid_argument>(
        [&] { static_cast<void>(Optimizer::plan(table_of_sizes({8}), config_with(scale), {})); });
  };
  CHECK(refusal({}) == "");
  CHECK(refusal({.initial = 0}).find("config.loss_scale: initial") != std::string::npos);
  CHECK(refusal({.initial = std::numeric_limits<float>::infinity()}).find("initial") != std::string::npos);
  CHECK(refusal({.initial = 1e-40f, .minimum = 1e-40f}).find("initial must be at least 2^-126") !=
        std::string::npos);  // its inverse is infinite, and a gradient of 0 would become NaN
  CHECK(refusal({.initial = 1, .minimum = 1e-40f}).find("minimum") != std::string::npos);
  CHECK(refusal({.initial = 0x1p-126f, .minimum = 0x1p-126f}) == "");
  CHECK(refusal({.growth_factor = 1}).find("growth_factor") != std::string::npos);
  CHECK(refusal({.backoff_factor = 1}).find("backoff_factor") != std::string::npos);
  CHECK(refusal({.backoff_factor = 0}).find("backoff_factor") != std::string::npos);
  CHECK(refusal({.growth_interval = 0}).find("growth_interval") != std::string::npos);
  CHECK(refusal({.hysteresis = 0}).find("hysteresis") != std::string::npos);
  CHECK(refusal({.minimum = 0}).find("minimum") != std::string::npos);
  CHECK(refusal({.initial = 2, .minimum = 4}).find("minimum") != std::string::npos);
}

TEST_CASE("Ranks whose loss scales are set up differently refuse each other", "[zero][law6][host]") {
  const int field = GENERATE(0, 1, 2, 3, 4, 5, 6);
  const auto messages = messages_of_ranks<so::CollectiveError>(3, [&](HostThreads comm) {
    auto config = config_with({});
    if (comm.rank() == 1) {
      auto& scale = *config.loss_scale;
      if (field == 0) scale.initial = 32768;
      if (field == 1) scale.growth_factor = 4;
      if (field == 2) scale.backoff_factor = 0.25f;
      if (field == 3) scale.growth_interval = 1000;
      if (field == 4) scale.hysteresis = 2;
      if (field == 5) scale.minimum = 2;
      if (field == 6) config.loss_scale.reset();
    }
    Engine<Optimizer> engine(table_of_sizes({8}), config, std::move(comm));
  });
  CAPTURE(field);
  for (const auto& message : messages) CHECK(message.find("loss_scale") != std::string::npos);
}
