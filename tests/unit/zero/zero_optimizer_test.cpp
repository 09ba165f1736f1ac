// SPDX-License-Identifier: Apache-2.0
// What the laws' tests do not show of ZeroOptimizer.
#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <shardopt/collectives/solo.hpp>
#include <support/small_engine.hpp>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

using namespace test;
using Catch::Approx;

namespace {

using Sgd = ThreadsOptimizer<so::SGD>;
const Sgd::Config plain_sgd{.groups = {{"default", {.lr = 1}}}};

}  // namespace

TEST_CASE("The parts that ranks own cover every trainable element once", "[zero][host]") {
  const int world = GENERATE(1, 2, 3, 8);
  const auto table = packed_table({{"a", {700}},
                                   {"frozen", {9}, "default", true},
                                   {"b", {0}},
                                   {"tied", {700}, "default", false, "a"},
                                   {"c", {1, 555}}});
  const auto parts = on_ranks(world, [&](HostThreads comm) {
    Engine<ThreadsOptimizer<so::AdamW>> engine(table, {.sharding = {.bucket_bytes = 1}}, std::move(comm));
    std::vector<std::pair<std::string, so::Range>> mine;
    for (const auto& [name, range] : engine.optimizer.owned()) mine.emplace_back(std::string(name), range);
    return mine;
  });
  std::vector<int> a(700, 0);
  std::vector<int> c(555, 0);
  for (const auto& mine : parts) {
    for (const auto& [name, range] : mine) {
      REQUIRE((name == "a" || name == "c"));
      for (std::int64_t i = range.begin; i < range.end; ++i)
        ++(name == "a" ? a : c).at(static_cast<std::size_t>(i));
    }
  }
  CHECK(a == std::vector<int>(700, 1));
  CHECK(c == std::vector<int>(555, 1));
  if (world == 1) CHECK(parts[0].size() == 2);  // neighbouring parts are one
}

TEST_CASE("A gradient scale in device memory is read when the step runs", "[zero][host]") {
  const auto values = on_ranks(2, [](HostThreads comm) {
    Engine<Sgd> engine(table_of_sizes({5}), plain_sgd, std::move(comm));
    float scale = 0.25f;
    engine.fill_gradients(1);
    const double norm = engine.step({.gradient_scale = &scale}).norm;
    scale = std::numeric_limits<float>::infinity();
    const bool skipped = engine.step({.gradient_scale = &scale}).skipped;
    return std::vector<double>{engine.parameter(4), norm, skipped ? 1.0 : 0.0};
  });
  for (const auto& rank : values) CHECK(rank == std::vector<double>{-0.5, std::sqrt(5 * 0.25), 1});
}

TEST_CASE("A negative gradient scale climbs, and the norm stays a norm", "[zero][host]") {
  const auto values = on_ranks(2, [](HostThreads comm) {
    Engine<Sgd> engine(table_of_sizes({4}), plain_sgd, std::move(comm));
    engine.fill_gradients(1);
    const double norm = engine.step({.gradient_scale = -0.5f}).norm;
    return std::vector<double>{engine.parameter(0), norm};
  });
  for (const auto& rank : values) CHECK(rank == std::vector<double>{1, 2});
}

TEST_CASE("set_rule takes effect in the next step, and rule() tells it", "[zero][host]") {
  const auto values = on_ranks(2, [](HostThreads comm) {
    Engine<Sgd> engine(packed_table({{"a", {300}, "x"}, {"b", {300}, "y"}}),
                       {.groups = {{"x", {.lr = 1}}, {"y", {.lr = 2}}}}, std::move(comm));
    std::vector<double> seen;
    for (const double lr : {1.0, 0.5, 0.25}) {
      engine.optimizer.set_rule("x", {.lr = lr}, {});
      engine.fill_gradients(0.5);
      engine.step();
      seen.push_back(engine.parameter(0));
      seen.push_back(engine.optimizer.rule("x").lr);
    }
    seen.push_back(engine.parameter(599));
    seen.push_back(engine.optimizer.config().groups[1].rule.lr);
    return seen;
  });
  for (const auto& rank : values) CHECK(rank == std::vector<double>{-1, 1, -1.5, 0.5, -1.75, 0.25, -6, 2});
}

TEST_CASE("Tied weights are one parameter: updated once, counted once in the norm, announced by either name",
          "[zero][host]") {
  const auto table = packed_table({{"emb", {6}}, {"head", {6}, "default", false, "emb"}, {"b", {3}}});
  const auto values = on_ranks(2, [&](HostThreads comm) {
    Engine<Sgd> engine(table, plain_sgd, std::move(comm));
    engine.fill_gradients(0.5);
    engine.optimizer.gradient_ready(so::ParameterId{1}, {});
    const auto result = engine.step();
    engine.optimizer.wait_parameters(so::ParameterId{1}, {});
    std::vector<double> seen = engine.values();
    seen.push_back(result.norm);
    seen.push_back(static_cast<double>(engine.optimizer.memory_plan().parameters));
    return seen;
  });
  for (const auto& rank : values) {
    std::vector<double> expected(9, -1.0);
    expected.push_back(3);
    expected.push_back(9);
    CHECK(rank == expected);
  }
}

TEST_CASE("Buckets are reduced from the last to the first, whatever order gradients come in",
          "[zero][host]") {
  class Order : public so::Observer {
   public:
    void bucket_reduced(std::int64_t bucket, std::int64_t bytes) override {
      seen.push_back(100 * bytes + bucket);
    }
    std::vector<std::int64_t> seen;
  };
  const auto orders = on_ranks(2, [](HostThreads comm) {
    Order order;
    Sgd::Config config = plain_sgd;
    config.sharding.bucket_bytes = 1;
    config.observer = &order;
    Engine<Sgd> engine(table_of_sizes({512, 512, 500}), config, std::move(comm));
    engine.optimizer.gradient_ready(so::ParameterId{0}, {});
    engine.optimizer.gradient_ready(so::ParameterId{1}, {});
    order.seen.push_back(-1);  // whole, but not their turn
    engine.optimizer.gradient_ready(so::ParameterId{2}, {});
    order.seen.push_back(-2);  // all at once
    engine.step();
    return order.seen;
  });
  for (const auto& seen : orders) CHECK(seen == std::vector<std::int64_t>{-1, 200002, 204801, 204800, -2});
}

TEST_CASE("Adopted state buffers are zeroed, or go on as they stand", "[zero][host]") {
  using Optimizer = ThreadsOptimizer<so::SGD, so::Mixed<so::bf16, float, float>>;
  const bool initialize = GENERATE(true, false);
  const auto table = table_of_sizes({8});
  bool adopted = false;
  const auto seen = on_ranks(1, [&](HostThreads comm) {
    std::vector<float> momentum(8, 2.0f);
    std::vector<float> master(8, 5.0f);
    std::vector<so::bf16> parameters(8, rounded<so::bf16>(1.0));
    std::vector<float> gradients(8, 1.0f);
    so::StateBuffers states{{"momentum_buffer", momentum.data()}, {"master", master.data()}};
    states.initialize = initialize;
    Optimizer optimizer(table, {.groups = {{"default", {.lr = 0.5, .momentum = 0.5}}}}, std::move(comm),
                        so::FlatBuffers{parameters.data(), gradients.data()}, states, {});
    adopted = optimizer.state("momentum_buffer").data() == momentum.data();
    std::vector<float> result{momentum[3], master[3]};
    optimizer.step({}, {});
    result.push_back(master[3]);
    result.push_back(static_cast<float>(value_of(parameters[3])));
    return result;
  });
  CHECK(adopted);
  // A buffer of 2 becomes 0.5 · 2 + 1.
  CHECK(seen[0] == (initialize ? std::vector<float>{0, 1, 0.5f, 0.5f} : std::vector<float>{2, 5, 4, 4}));
}

TEST_CASE("Momentum begins with the first gradient, after skipped steps and where set_rule switches it on",
          "[zero][host]") {
  const bool count_skipped = GENERATE(false, true);
  const auto seen = on_ranks(2, [&](HostThreads comm) {
    Engine<Sgd> engine(packed_table({{"a", {300}, "a"}, {"b", {300}, "b"}}),
                       {.groups = {{"a", {.lr = 1}}, {"b", {.lr = 1, .momentum = 0.5, .dampening = 0.75}}},
                        .count_skipped_updates = count_skipped},
                       std::move(comm));
    engine.fill_gradients(std::numeric_limits<double>::infinity());
    engine.step();
    std::vector<double> mine;
    for (const double gradient : {8.0, 1.0, 1.0}) {
      engine.fill_gradients(gradient / 2);
      engine.step();
      mine.push_back(engine.parameter(0));
      mine.push_back(engine.parameter(599));
      if (gradient == 8) engine.optimizer.set_rule("a", {.lr = 1, .momentum = 0.5}, {});
    }
    return mine;
  });
  // a: 8 without momentum, then b = 1, 1.5. b: b = 8, 0.5 · 8 + 0.25, 0.5 · 4.25 + 0.25.
  for (const auto& rank : seen) CHECK(rank == std::vector<double>{-8, -8, -9, -12.25, -10.5, -14.625});
}

TEST_CASE("The observer is warned of what is legal and probably not meant", "[zero][host]") {
  class Listener : public so::Observer {
   public:
    void warning(std::string_view text) override { texts.emplace_back(text); }
    std::vector<std::string> texts;
  };
  const auto told = [](int world, const Sgd::Config& given) {
    return on_ranks(world, [&](HostThreads comm) {
      Listener listener;
      Sgd::Config config = given;
      config.observer = &listener;
      Engine<Sgd> engine(packed_table({{"a", {300}}, {"still", {9}, "other", true}}), config,
                         std::move(comm));
      engine.fill_gradients(1);
      engine.step();
      return listener.texts;
    });
  };
  CHECK(told(2, {}) == std::vector<std::vector<std::string>>(2));
  CHECK(told(1, {.groups = {{"default", {}}, {"other", {}}}})[0] ==
        std::vector<std::string>{"group 'other' holds no element of a trainable parameter"});
  CHECK(told(1, {.loss_scale = so::DynamicLossScale{}})[0] ==
        std::vector<std::string>{"config.loss_scale is set, but gradients are fp32, which need none"});
  const auto idle = told(3, {});
  CHECK(idle[1].empty());
  REQUIRE(idle[2].size() == 1);
  CHECK(idle[2][0].find("rank 2 of 3 owns none of the 300 elements") != std::string::npos);
}

TEST_CASE("The engine's scalars ride along, and their sums over ranks are exact", "[zero][host]") {
  const int world = GENERATE(1, 3, 8);
  const auto results = on_ranks(world, [&](HostThreads comm) {
    const int rank = comm.rank();
    Engine<Sgd> engine(table_of_sizes({8}), plain_sgd, std::move(comm));
    const float loss = rank == 0 ? 1e30f : rank == world - 1 ? -1e30f : 0x1p-40f;
    const float count = static_cast<float>(rank + 1);
    const float bad = rank == world - 1 ? std::numeric_limits<float>::quiet_NaN() : 1.0f;
    const auto with = engine.step({.scalars = {&loss, &count, &bad}});
    const float tiny = 1e-35f;
    const auto without = engine.step({.scalars = {&tiny}});
    return std::vector<double>{
        with.scalars[0],          with.scalars[1],    std::isnan(with.scalars[2]) ? 1.0 : 0.0,
        with.skipped ? 1.0 : 0.0, without.scalars[1], without.scalars[0]};
  });
  const double loss = world == 1 ? static_cast<double>(1e30f) : (world - 2) * 0x1p-40;
  for (const auto& rank : results)
    CHECK(rank ==
          std::vector<double>{loss, world * (world + 1) / 2.0, 1, 0, 0, world * static_cast<double>(1e-35f)});
}

TEST_CASE("Counters are read from the device, after skipped, discarded and applied steps", "[zero][host]") {
  const auto seen = on_ranks(2, [](HostThreads comm) {
    Engine<Sgd> engine(table_of_sizes({8}), plain_sgd, std::move(comm));
    engine.step();
    engine.fill_gradients(std::numeric_limits<double>::infinity());
    engine.step();
    engine.fill_gradients(1);
    engine.optimizer.reduce({}, {});
    engine.optimizer.discard({});
    const auto last = engine.optimizer.last_result({}).get();
    const so::StepCounters counters = engine.optimizer.counters({});
    return std::vector<std::int64_t>{counters.iteration, counters.updates, last.iteration, last.updates,
                                     last.skipped ? 1 : 0};
  });
  for (const auto& rank : seen) CHECK(rank == std::vector<std::int64_t>{3, 1, 3, 1, 1});
}

TEST_CASE("A rank that is refused at the start is an error for the others, not a hang",
          "[zero][law9][host]") {
  const auto messages = messages_of_ranks(3, [](HostThreads comm) {
    Sgd::Config config = plain_sgd;
    if (comm.rank() == 1) config.max_norm = -1;
    Engine<Sgd> engine(table_of_sizes({8}), config, std::move(comm));
  });
  for (const std::string& message : messages) CHECK(message.find("config.max_norm") != std::string::npos);
  for (const std::size_t other : {0U, 2U}) CHECK(messages[other].find("rank 1") != std::string::npos);
}

TEST_CASE("Two optimizers on one communicator keep their calls in program order", "[zero][host]") {
  const auto values = on_ranks(3, [](HostThreads comm) {
    Engine<Sgd> first(table_of_sizes({600}), plain_sgd, comm.borrow());
    Engine<ThreadsOptimizer<so::AdamW>> second(
        table_of_sizes({70}), {.groups = {{"default", {.lr = 0.5, .weight_decay = 0}}}}, std::move(comm));
    first.fill_gradients(1);
    second.fill_gradients(1);
    const auto ticket = first.optimizer.step({.gradient_scale = 0.5f}, {});
    second.step();
    return std::vector<double>{first.parameter(599), second.parameter(69), ticket.get().norm};
  });
  for (const auto& rank : values) {
    CHECK(rank[0] == -1.5);
    CHECK(rank[1] == Approx(-0.5).epsilon(1e-6));
    CHECK(rank[2] == Approx(1.5 * std::sqrt(600)).epsilon(1e-12));
  }
}

TEST_CASE("What belongs to the other half of a step is refused", "[zero][law9][host]") {
  const auto seen = on_ranks(1, [](HostThreads comm) {
    Engine<Sgd> engine(table_of_sizes({4}), plain_sgd, std::move(comm));
    const float one = 1;
    auto& optimizer = engine.optimizer;
    const auto refused = [](const auto& call) { return message_of<std::invalid_argument>(call); };
    std::vector<std::string> texts{refused([&] { optimizer.reduce({.lr_factor = 0.5f}, {}); })};
    optimizer.reduce({.gradient_scale = 0.5f}, {});
    texts.push_back(refused([&] { optimizer.apply({.gradient_scale = 0.5f}, {}); }));
    texts.push_back(refused([&] { optimizer.apply({.gradient_scale = &one}, {}); }));
    texts.push_back(refused([&] { optimizer.apply({.scalars = {&one}}, {}); }));
    engine.fill_gradients(1);
    optimizer.apply({.lr_factor = 0.5f}, {});
    texts.push_back(std::to_string(engine.parameter(0)));
    return texts;
  });
  CHECK(seen[0][0].find("reduce() takes no lr_factor") != std::string::npos);
  for (const std::size_t k : {1U, 2U, 3U})
    CHECK(seen[0][k].find("apply() takes lr_factor only") != std::string::npos);
  CHECK(seen[0][4] == "-0.250000");
}

TEST_CASE("A factor that differs between ranks in apply() shows in the next step's ticket",
          "[zero][law6][host]") {
  const auto seen = on_ranks(3, [](HostThreads comm) {
    const bool odd = comm.rank() == 1;
    Engine<Sgd> engine(table_of_sizes({4}), plain_sgd, std::move(comm));
    std::string differ;
    for (const float factor : {1.0f, odd ? 0.5f : 0.25f, 1.0f, 1.0f}) {
      engine.optimizer.reduce({}, {});
      differ += engine.optimizer.apply({.lr_factor = factor}, {}).get().inputs_differ ? "1" : "0";
    }
    engine.optimizer.reduce({}, {});
    engine.optimizer.apply({.lr_factor = odd ? 0.5f : 0.25f}, {});
    differ += engine.step().inputs_differ ? "1" : "0";
    differ += engine.step().inputs_differ ? "1" : "0";
    return differ;
  });
  for (const std::string& differ : seen) CHECK(differ == "001010");
}

TEST_CASE("Gradient scales that differ in device memory show in the ticket", "[zero][law6][host]") {
  const auto seen = on_ranks(2, [](HostThreads comm) {
    float scale = comm.rank() == 0 ? 0.5f : 0.25f;
    Engine<Sgd> engine(table_of_sizes({4}), plain_sgd, std::move(comm));
    std::string differ = engine.step({.gradient_scale = &scale}).inputs_differ ? "1" : "0";
    scale = 0.5f;
    // The same value, given in two ways.
    const so::StepOptions options{.gradient_scale = engine.optimizer.rank() == 0 ? so::GradientScale(&scale)
                                                                                 : so::GradientScale(0.5f)};
    return differ + (engine.step(options).inputs_differ ? "1" : "0");
  });
  for (const std::string& differ : seen) CHECK(differ == "10");
}

TEST_CASE("A gradient scale that is a null pointer is refused", "[zero][law9][host]") {
  const auto texts = on_ranks(1, [](HostThreads comm) {
    Engine<Sgd> engine(table_of_sizes({4}), plain_sgd, std::move(comm));
    const so::GradientScale null(static_cast<const float*>(nullptr));
    const auto refused = [](const auto& call) { return message_of<std::invalid_argument>(call); };
    return std::vector<std::string>{refused([&] { engine.optimizer.step({.gradient_scale = null}, {}); }),
                                    refused([&] { engine.optimizer.set_inputs(1, null, {}); })};
  });
  for (const std::string& text : texts[0])
    CHECK(text.find("gradient_scale is a null pointer") != std::string::npos);
}

TEST_CASE("Runs of states take as many values as they have elements, between steps", "[zero][law9][host]") {
  const auto seen = on_ranks(3, [](HostThreads comm) -> std::string {
    Engine<ThreadsOptimizer<so::AdamW>> engine(table_of_sizes({700, 5, 1}), {}, std::move(comm));
    auto& optimizer = engine.optimizer;
    const auto runs = optimizer.states();
    std::vector<float> values;
    for (const auto& run : runs) {
      for (std::int64_t i = 0; i < run.range.size(); ++i)
        values.push_back(static_cast<float>(values.size()) + 1);
    }
    std::vector<float> more = values;
    more.push_back(7);
    const std::string told = message_of<std::invalid_argument>([&] { optimizer.set_states(runs, more, {}); });
    if (told.find("the runs have " + std::to_string(values.size()) + " elements, not " +
                  std::to_string(more.size())) == std::string::npos)
      return "says: " + told;
    // Longer than what the rank keeps, in front of it, or of another name.
    for (const auto& wrong :
         {so::StateRun{
              runs[0].state, runs[0].parameter, {runs[0].range.begin, runs[0].range.end + 1}, runs[0].data},
          so::StateRun{runs[0].state, runs[0].parameter, runs[0].range, runs[0].data - 1},
          so::StateRun{runs[0].state, "other", runs[0].range, runs[0].data}}) {
      const std::vector<float> many(static_cast<std::size_t>(wrong.range.size()), 3);
      const std::string refused = message_of<std::invalid_argument>([&] {
        optimizer.set_states({&wrong, 1}, many, {});
      });
      if (refused.find("no part of a run of states()") == std::string::npos) return "says: " + refused;
    }
    for (const auto& run : runs) {
      for (std::int64_t i = 0; i < run.range.size(); ++i) {
        if (run.data[i] != 0) return "written when it was refused";
      }
    }
    optimizer.set_states(runs, values, {});
    std::size_t at = 0;
    for (const auto& run : runs) {
      for (std::int64_t i = 0; i < run.range.size(); ++i) {
        if (run.data[i] != values[at++]) return "not written";
      }
    }
    optimizer.reduce({}, {});
    const std::string late = message_of<std::logic_error>([&] { optimizer.set_states(runs, values, {}); });
    optimizer.discard({});
    return late.find("in the middle of a step") == std::string::npos ? "says: " + late : "";
  });
  for (const std::string& unexpected : seen) CHECK(unexpected == "");
}

TEST_CASE("Zeroing and other hyper-parameters are refused in the middle of a step", "[zero][law9][host]") {
  const auto seen = on_ranks(2, [](HostThreads comm) {
    Engine<Sgd> engine(table_of_sizes({4, 5}), plain_sgd, std::move(comm));
    auto& optimizer = engine.optimizer;
    engine.fill_gradients(0.5);
    std::string unexpected;
    const auto refuse = [&] {
      const auto text = [](const auto& call) { return message_of<std::logic_error>(call); };
      for (const std::string& told : {text([&] { optimizer.zero_gradients({}); }),
                                      text([&] { optimizer.set_rule("default", {.lr = 7}, {}); })}) {
        if (told.find("in the middle of a step") == std::string::npos) unexpected = "says: " + told;
      }
    };
    optimizer.gradient_ready(so::ParameterId{1}, {});
    refuse();
    optimizer.reduce({}, {});
    refuse();
    optimizer.apply({}, {});
    if (engine.parameter(0) != -1 || engine.parameter(8) != -1) unexpected += "another step";
    optimizer.zero_gradients({});
    if (engine.gradient(8) != 0) unexpected += "not zeroed";
    return unexpected;
  });
  for (const std::string& unexpected : seen) CHECK(unexpected == "");
}

TEST_CASE("A table of frozen parameters needs their memory, and no gradients", "[zero][law9][host]") {
  const auto table = packed_table({{"frozen", {300}, "default", true}});
  std::vector<float> values(300, 1.0f);
  const auto start = [&](float* parameters) {
    return messages_of_ranks(2, [&, parameters](HostThreads comm) {
      Sgd optimizer(table, plain_sgd, std::move(comm), so::FlatBuffers<float, float>{parameters, nullptr},
                    {});
      optimizer.step({}, {});
    })[0];
  };
  CHECK(start(values.data()) == "");
  CHECK(start(nullptr).find("null pointer") != std::string::npos);
}

TEST_CASE("Only buffers are taken as buffers", "[zero][host]") {
  using Table = const so::ParameterTable&;
  using Config = const Sgd::Config&;
  using Stream = so::Host::Stream;
  STATIC_CHECK(
      std::is_constructible_v<Sgd, Table, Config, HostThreads, so::FlatBuffers<float, float>, Stream>);
  STATIC_CHECK(
      std::is_constructible_v<Sgd, Table, Config, HostThreads, so::SeparateBuffers<float, float>, Stream>);
  STATIC_CHECK_FALSE(std::is_constructible_v<Sgd, Table, Config, HostThreads, int, Stream>);
  STATIC_CHECK_FALSE(std::is_move_constructible_v<Sgd>);
}

TEST_CASE("A skipped step is told once, whichever of its tickets are asked", "[zero][host]") {
  class Watcher : public so::Observer {
   public:
    void step_skipped(const so::StepResult& result) override { seen.push_back(result.iteration); }
    std::vector<std::int64_t> seen;
  };
  const auto seen = on_ranks(2, [](HostThreads comm) {
    Watcher watcher;
    Sgd::Config config = plain_sgd;
    config.observer = &watcher;
    Engine<Sgd> engine(table_of_sizes({4}), config, std::move(comm));
    engine.fill_gradients(std::numeric_limits<double>::infinity());
    const auto early = engine.optimizer.reduce({}, {});
    static_cast<void>(early.get());
    const auto late = engine.optimizer.apply({}, {});
    static_cast<void>(late.get());
    static_cast<void>(late.get());
    static_cast<void>(early.get());
    engine.fill_gradients(1);
    static_cast<void>(engine.optimizer.reduce({}, {}).get());
    static_cast<void>(engine.optimizer.discard({}).get());
    static_cast<void>(engine.optimizer.last_result({}).get());
    engine.optimizer.set_counters({}, {});
    engine.fill_gradients(std::numeric_limits<double>::infinity());
    engine.step();
    return watcher.seen;
  });
  for (const auto& rank : seen) CHECK(rank == std::vector<std::int64_t>{1, 2, 1});
}

TEST_CASE("Counts that no step could follow are refused", "[zero][host]") {
  const std::int64_t most = so::max_steps;
  const auto seen = on_ranks(1, [&](HostThreads comm) {
    Engine<Sgd> engine(table_of_sizes({4}), plain_sgd, std::move(comm));
    const auto refusal = [&](std::int64_t iteration, std::int64_t updates) {
      return message_of<std::invalid_argument>(
          [&] { engine.optimizer.set_counters({.iteration = iteration, .updates = updates}, {}); });
    };
    std::vector<std::string> told{refusal(most + 1, 0), refusal(0, most + 1), refusal(-1, 0),
                                  refusal(most, most)};
    engine.fill_gradients(1);
    engine.step();
    const auto iteration = engine.optimizer.counters({}).iteration;
    for (const auto& counters :
         {so::StepCounters{.loss_scale_good_steps = most + 1}, so::StepCounters{.loss_scale_hysteresis = -1},
          so::StepCounters{.loss_scale = 1e-45f}}) {
      told.push_back(message_of<std::invalid_argument>([&] { engine.optimizer.set_counters(counters, {}); }));
    }
    return std::pair(told, iteration);
  });
  const auto& [told, iteration] = seen.front();
  CHECK(told[0].find("at most " + std::to_string(most)) != std::string::npos);
  CHECK(told[1] == told[0]);
  CHECK(told[2].find("cannot be negative") != std::string::npos);
  CHECK(told[3].empty());
  CHECK(told[4] == told[0]);
  CHECK(told[5] == told[2]);
  CHECK(told[6].find("at least 2^-126") != std::string::npos);
  CHECK(iteration == most + 1);
}

TEST_CASE("A gradient that is finite before it is scaled and not afterwards makes all ranks skip",
          "[zero][law7][host]") {
  const float scale = 1e20f;
  const float max_norm = GENERATE(0.0f, 2.0f);
  const auto seen = on_ranks(2, [&](HostThreads comm) {
    auto config = plain_sgd;
    if (max_norm > 0) config.max_norm = max_norm;
    Engine<Sgd> engine(table_of_sizes({600}), config, std::move(comm), 7);
    const std::vector<float> before = engine.parameters;
    engine.set_gradients([](std::int64_t i) { return i == 5 ? 1e30 : 0.0; });
    const auto result = engine.step({.gradient_scale = &scale});
    return std::tuple(result.skipped, engine.parameters == before, engine.parameters[5]);
  });
  for (const auto& [skipped, unchanged, moved] : seen) {
    CHECK(skipped == (max_norm == 0));  // what is clipped is finite
    CHECK(unchanged == (max_norm == 0));
    CHECK(std::isfinite(moved));
  }
}

TEST_CASE("Loss scales and numbers of updates that differ are told in tickets", "[zero][law6][host]") {
  const bool of_scale = GENERATE(false, true);
  const auto differ = on_ranks(2, [&](HostThreads comm) {
    const bool other = comm.rank() == 1;
    auto config = plain_sgd;
    config.loss_scale = so::DynamicLossScale{.initial = 4};
    Engine<Sgd> engine(table_of_sizes({600}), config, std::move(comm));
    std::string seen = engine.step().inputs_differ ? "1" : "0";
    auto counters = engine.optimizer.counters({});
    if (other && of_scale) counters.loss_scale = 8;
    if (other && !of_scale) counters.updates += 1;
    engine.optimizer.set_counters(counters, {});
    return seen += engine.step().inputs_differ ? "1" : "0";
  });
  for (const auto& rank : differ) CHECK(rank == "01");
}

TEST_CASE("A gradient scale that is not finite on one rank alone makes all ranks skip",
          "[zero][law7][host]") {
  const float bad = GENERATE(std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity());
  const auto seen = on_ranks(3, [&](HostThreads comm) {
    const float scale = comm.rank() == 1 ? bad : 0.5f;
    Engine<Sgd> engine(table_of_sizes({600}), plain_sgd, std::move(comm), 7);
    engine.fill_gradients(1);
    const auto result = engine.step({.gradient_scale = &scale});
    return std::tuple(result.skipped, result.inputs_differ, result.non_finite, result.updates,
                      engine.values() == std::vector<double>(600, 7.0) ? 1 : 0);
  });
  for (const auto& rank : seen) CHECK(rank == std::tuple(true, true, 1, 0, 1));
}

TEST_CASE("Scales and clipping are one factor: what it can hold together is not lost in between",
          "[zero][host]") {
  const auto seen = on_ranks(2, [](HostThreads comm) {
    Sgd::Config config = plain_sgd;
    config.max_norm = 1e-3f;
    Engine<Sgd> engine(table_of_sizes({1}), config, std::move(comm));
    engine.fill_gradients(0.5e30);
    engine.step({.gradient_scale = 1e20f});  // a norm of 1e50: the clip factor alone is below float
    return engine.parameter(0);
  });
  for (const double p : seen) CHECK(std::fabs(p + 1e-3) < 1e-9);
}

TEST_CASE("A factor beyond float skips the step instead of making NaN of zeros", "[zero][host]") {
  using Optimizer = ThreadsOptimizer<so::SGD, so::Mixed<so::fp16, so::fp16, float>>;
  const auto seen = on_ranks(2, [](HostThreads comm) {
    Optimizer::Config config{.groups = {{"default", {.lr = 1}}}};
    config.loss_scale = so::DynamicLossScale{.initial = 0x1p-20f, .minimum = 0x1p-30f};
    Engine<Optimizer> engine(table_of_sizes({5}), config, std::move(comm), 2);
    const auto result = engine.step({.gradient_scale = 3e38f});
    return std::pair(result.skipped, engine.values());
  });
  for (const auto& rank : seen) CHECK(rank == std::pair(true, std::vector<double>(5, 2.0)));
}
