// SPDX-License-Identifier: Apache-2.0
// Law 9: errors come before effects; a failure in the middle of a step breaks the optimizer, and it says so.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <support/small_engine.hpp>
#include <support/watched_collective.hpp>

#include <array>
#include <cstddef>
#include <exception>
#include <functional>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

using namespace test;

namespace {

using Optimizer = ThreadsOptimizer<so::AdamW>;
using WatchedThreads = Watched<HostThreads>;
using WatchedOptimizer = so::ZeroOptimizer<so::AdamW, so::FlatSharding, WatchedThreads, so::FullPrecision>;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

/// A call that must be refused, and a part of what it says.
template <class Subject>
struct BadCall {
  const char* what;
  std::function<void(Subject&)> call;
  const char* told;
};

std::vector<BadCall<Optimizer>> bad_calls_between_steps() {
  return {
      {"an unknown id", [](Optimizer& o) { o.gradient_ready(so::ParameterId{9}, {}); },
       "no parameter has the id 9"},
      {"an unknown id among known ones",
       [](Optimizer& o) {
         const std::vector<so::ParameterId> ids{{0}, {2}, {9}};
         o.gradient_ready(ids, {});
       },
       "no parameter has the id 9"},
      {"one id twice in a call",
       [](Optimizer& o) {
         const std::vector<so::ParameterId> ids{{1}, {1}};
         o.gradient_ready(ids, {});
       },
       "'p1' was announced twice"},
      {"a tied parameter by both names",
       [](Optimizer& o) {
         const std::vector<so::ParameterId> ids{{1}, {3}};
         o.gradient_ready(ids, {});
       },
       "'p1' was announced twice"},
      {"an infinite lr_factor", [](Optimizer& o) { o.step({.lr_factor = infinity}, {}); },
       "lr_factor must be finite"},
      {"a lr_factor that is NaN", [](Optimizer& o) { o.step({.lr_factor = not_a_number}, {}); },
       "lr_factor must be finite"},
      {"an infinite gradient_scale", [](Optimizer& o) { o.step({.gradient_scale = infinity}, {}); },
       "gradient_scale must be finite"},
      {"a gradient_scale that is NaN in reduce",
       [](Optimizer& o) { o.reduce({.gradient_scale = not_a_number}, {}); }, "gradient_scale must be finite"},
      {"apply without reduce", [](Optimizer& o) { o.apply({}, {}); }, "without reduce()"},
      {"discard without reduce", [](Optimizer& o) { o.discard({}); }, "without reduce()"},
      {"waiting for an unknown parameter", [](Optimizer& o) { o.wait_parameters(so::ParameterId{7}, {}); },
       "no parameter has the id 7"},
      {"a rule for an unknown group", [](Optimizer& o) { o.set_rule("nobody", {}, {}); }, "'nobody'"},
      {"the rule of an unknown group", [](Optimizer& o) { static_cast<void>(o.rule("nobody")); }, "'nobody'"},
      {"a rule out of range", [](Optimizer& o) { o.set_rule("default", {.lr = -1}, {}); }, "lr"},
      {"a beta out of range", [](Optimizer& o) { o.set_rule("default", {.beta2 = 1}, {}); }, "beta2"},
  };
}

std::vector<BadCall<Optimizer>> bad_calls_after_reduce() {
  return {
      {"announcing", [](Optimizer& o) { o.gradient_ready(so::ParameterId{0}, {}); }, "after reduce()"},
      {"asking for the last step", [](Optimizer& o) { static_cast<void>(o.last_result({})); },
       "after reduce()"},
      {"reducing again", [](Optimizer& o) { o.reduce({}, {}); }, "after reduce()"},
      {"a whole step", [](Optimizer& o) { o.step({}, {}); }, "after reduce()"},
      {"applying with an infinite lr_factor", [](Optimizer& o) { o.apply({.lr_factor = infinity}, {}); },
       "lr_factor must be finite"},
  };
}

const std::vector<Packed>& tensors() {
  static const std::vector<Packed> all = {
      {"p0", {300}}, {"p1", {777}}, {"p2", {5}}, {"p3", {777}, "default", false, "p1"}};
  return all;
}

/// Three steps; between and within them whatever is asked, on every rank.
std::vector<double> trained_around(HostThreads comm, const std::vector<BadCall<Optimizer>>& between,
                                   const std::vector<BadCall<Optimizer>>& within, std::string& unexpected) {
  const int rank = comm.rank();
  Engine<Optimizer> engine(packed_table(tensors()), {.sharding = {.bucket_bytes = 1}, .max_norm = 1},
                           std::move(comm), 1.0);
  const auto refuse = [&](const std::vector<BadCall<Optimizer>>& calls) {
    for (const auto& bad : calls) {
      const std::string message =
          message_of<std::logic_error>([&] { bad.call(engine.optimizer); });  // invalid_argument is one
      if (message.find(bad.told) == std::string::npos)
        unexpected = std::string(bad.what) + " says: " + message;
    }
  };
  for (int step = 0; step < 3; ++step) {
    engine.set_gradients(
        [&](std::int64_t i) { return static_cast<double>(noise(31, step, rank, i) % 1000) / 999 - 0.5; });
    refuse(between);
    engine.optimizer.gradient_ready(so::ParameterId{1}, {});
    refuse(between);
    engine.optimizer.reduce({}, {});
    refuse(within);
    engine.optimizer.apply({}, {});
  }
  return engine.values();
}

}  // namespace

TEST_CASE("What argument checking refuses changes nothing: the steps around it leave the same bits",
          "[laws][law9][host]") {
  const int world = GENERATE(1, 3);
  std::vector<std::string> unexpected(static_cast<std::size_t>(world));
  const auto run = [&](const auto& between, const auto& within) {
    return on_ranks(world, [&](HostThreads comm) {
      auto& text = unexpected[static_cast<std::size_t>(comm.rank())];
      return trained_around(std::move(comm), between, within, text);
    });
  };
  const auto undisturbed = run(std::vector<BadCall<Optimizer>>{}, std::vector<BadCall<Optimizer>>{});
  const auto disturbed = run(bad_calls_between_steps(), bad_calls_after_reduce());
  for (const std::string& text : unexpected) CHECK(text == "");
  CHECK(undisturbed == disturbed);
}

TEST_CASE("A parameter that was announced cannot be announced again in the same step, nor by its other name",
          "[laws][law9][host]") {
  const auto messages = on_ranks(1, [&](HostThreads comm) {
    Engine<Optimizer> engine(packed_table(tensors()), {}, std::move(comm), 1.0);
    engine.optimizer.gradient_ready(so::ParameterId{3}, {});
    const std::string message =
        message_of<std::invalid_argument>([&] { engine.optimizer.gradient_ready(so::ParameterId{1}, {}); });
    engine.step();
    engine.optimizer.gradient_ready(so::ParameterId{1}, {});
    engine.step();
    return message;
  });
  CHECK(messages[0].find("announced twice in one step") != std::string::npos);
}

TEST_CASE("A configuration out of range is refused with the field's name, and nothing is touched",
          "[laws][law9][host]") {
  using Config = Optimizer::Config;
  struct Bad {
    std::function<void(Config&)> change;
    const char* told;
  };
  const std::vector<Bad> all = {
      {[](Config& c) { c.groups.clear(); }, "config.groups is empty"},
      {[](Config& c) {
         c.groups.push_back({"default", {}});
       },
       "names 'default' twice"},
      {[](Config& c) {
         c.groups = {{"other", {}}};
       },
       "is in group 'default', which config.groups lacks"},
      {[](Config& c) { c.groups[0].rule.lr = not_a_number; }, "lr is NaN"},
      {[](Config& c) { c.groups[0].rule.beta1 = 1; }, "(group 'default')"},
      {[](Config& c) { c.groups[0].rule.eps = -1; }, "eps"},
      {[](Config& c) { c.max_norm = -1; }, "config.max_norm"},
      {[](Config& c) { c.max_norm = not_a_number; }, "config.max_norm"},
      {[](Config& c) { c.clip_epsilon = -1; }, "config.clip_epsilon"},
      {[](Config& c) { c.clip_epsilon = infinity; }, "config.clip_epsilon"},
      {[](Config& c) { c.reduction = so::Reduction::native; },
       "config.reduction: threads has no native reduction of fp32"},
      {[](Config& c) { c.sharding.bucket_bytes = 0; }, "bucket_bytes"},
  };
  for (const Bad& bad : all) {
    CAPTURE(bad.told);
    Config config;
    bad.change(config);
    const auto table = packed_table(tensors());
    CHECK(message_of<std::invalid_argument>([&] {
            static_cast<void>(Optimizer::plan(table, config, {}));
          }).find(bad.told) != std::string::npos);
    std::vector<float> parameters(2000, 1.0f);
    std::vector<float> gradients(2000, 2.0f);
    for (const std::string& message : messages_of_ranks<std::invalid_argument>(2, [&](HostThreads comm) {
           Optimizer optimizer(table, config, std::move(comm),
                               so::FlatBuffers{parameters.data(), gradients.data()}, {});
         })) {
      CHECK(message.find(bad.told) != std::string::npos);
    }
    CHECK(parameters == std::vector<float>(2000, 1.0f));
    CHECK(gradients == std::vector<float>(2000, 2.0f));
  }
}

TEST_CASE("Buffers that do not fit the table are refused with what is wrong", "[laws][law9][host]") {
  const auto refusal = [](const so::ParameterTable& table, const auto& buffers,
                          const Optimizer::Memory& memory = {}) {
    return on_ranks(1, [&](HostThreads comm) {
      return message_of<std::invalid_argument>(
          [&] { Optimizer optimizer(table, {}, std::move(comm), buffers, memory, {}); });
    })[0];
  };
  std::vector<float> values(600, 1.0f);
  const auto flat = table_of_sizes({100});
  so::ParameterTable apart;
  apart.add({.name = "w", .shape = {100}, .parameter = values.data(), .gradient = values.data() + 100});
  so::ParameterTable overlapping;
  overlapping.add({.name = "w", .shape = {100}, .parameter = values.data(), .gradient = values.data() + 100});
  overlapping.add(
      {.name = "v", .shape = {100}, .parameter = values.data() + 199, .gradient = values.data() + 300});
  const so::FlatBuffers<float, float> good{values.data(), values.data() + 200};

  CHECK(refusal(flat, so::FlatBuffers<float, float>{nullptr, values.data()}).find("null pointer") !=
        std::string::npos);
  CHECK(refusal(flat, so::FlatBuffers<float, float>{values.data(), nullptr}).find("null pointer") !=
        std::string::npos);
  auto* odd = reinterpret_cast<float*>(reinterpret_cast<std::byte*>(values.data()) + 2);
  CHECK(refusal(flat, so::FlatBuffers<float, float>{odd, values.data() + 200})
            .find("not a multiple of its element size") != std::string::npos);
  CHECK(refusal(apart, good).find("pass SeparateBuffers") != std::string::npos);
  CHECK(refusal(flat, so::SeparateBuffers<float, float>{}).find("pass FlatBuffers") != std::string::npos);
  CHECK(refusal(overlapping, so::SeparateBuffers<float, float>{}).find("overlap") != std::string::npos);
  float* state = values.data() + 300;
  CHECK(refusal(flat, good, so::StateBuffers{{"exp_avg", state}}).find("lacks 'exp_avg_sq'") !=
        std::string::npos);
  CHECK(refusal(flat, good, so::StateBuffers{{"exp_avg", state}, {"exp_avg_sq", nullptr}})
            .find("null pointer for 'exp_avg_sq'") != std::string::npos);
  CHECK(refusal(flat, good,
                so::StateBuffers{{"exp_avg", state}, {"exp_avg_sq", state + 100}, {"master", state + 200}})
            .find("names 'master'") != std::string::npos);
  CHECK(values == std::vector<float>(600, 1.0f));
}

TEST_CASE("Memory that would be used for two ends is refused with the names of both", "[laws][law9][host]") {
  using Sgd = ThreadsOptimizer<so::SGD>;
  alignas(256) static std::array<float, 4096> values;
  values.fill(1.0f);
  const auto table = packed_table({{"a", {60}}, {"still", {9}, "default", true}, {"b", {31}}});
  const auto refusal = [&](auto optimizer, const auto& buffers, const auto& memory) {
    using Kind = typename decltype(optimizer)::type;
    return on_ranks(1, [&](HostThreads comm) {
      return message_of<std::invalid_argument>(
          [&] { Kind made(table, {}, std::move(comm), buffers, memory, {}); });
    })[0];
  };
  const std::type_identity<Optimizer> adamw;
  const std::type_identity<Sgd> sgd;
  float* const at = values.data();
  const so::FlatBuffers<float, float> good{at, at + 100};
  const typename Optimizer::Memory own;
  const auto states = [&](float* first, float* second) {
    return so::StateBuffers{{"exp_avg", first}, {"exp_avg_sq", second}};
  };

  CHECK(refusal(adamw, good, states(at + 200, at + 291)) == "");  // one behind the other
  CHECK(refusal(adamw, good, states(at + 200, at + 200)).find("state 'exp_avg") != std::string::npos);
  CHECK(refusal(adamw, good, states(at + 200, at + 290))
            .find("state 'exp_avg' and state 'exp_avg_sq' overlap") != std::string::npos);
  CHECK(refusal(adamw, good, states(at + 69, at + 300)).find("parameter 'b'") != std::string::npos);
  CHECK(refusal(adamw, good, states(at + 69, at + 300)).find("alias_of") == std::string::npos);
  CHECK(refusal(adamw, good, states(at + 300, at + 170)).find("gradient of 'b' and state 'exp_avg_sq'") !=
        std::string::npos);
  CHECK(refusal(adamw, good, states(at + 300, at + 65)).find("parameter 'still'") != std::string::npos);
  CHECK(refusal(adamw, good,
                so::StateBuffers{{"exp_avg", at + 200}, {"exp_avg", at + 300}, {"exp_avg_sq", at + 400}})
            .find("names 'exp_avg' twice") != std::string::npos);

  CHECK(refusal(sgd, so::FlatBuffers<float, float>{at, at + 1}, own).find("overlap") != std::string::npos);
  CHECK(refusal(sgd, so::FlatBuffers<float, float>{at, at}, own).find("parameter 'a'") != std::string::npos);
  CHECK(refusal(sgd, so::FlatBuffers<float, float>{at + 99, at}, own)
            .find("gradient of 'b' and parameter 'a'") != std::string::npos);
  CHECK(refusal(sgd, so::FlatBuffers<float, float>{at, at + 60}, own).find("parameter 'still'") !=
        std::string::npos);

  const auto plan = Sgd::plan(table, {}, {});
  alignas(256) static std::array<std::byte, 1 << 18> room;
  REQUIRE(plan.device_bytes + plan.pinned_bytes <= static_cast<std::int64_t>(room.size()));
  CHECK(refusal(sgd, good, so::Arena{room.data(), room.data() + plan.device_bytes}) == "");
  CHECK(refusal(sgd, good, so::Arena{room.data(), room.data()}).find("Arena.") != std::string::npos);
  CHECK(refusal(sgd, good, so::Arena{room.data(), room.data() + plan.device_bytes - 256})
            .find("Arena.device and Arena.pinned overlap") != std::string::npos);
  CHECK(refusal(sgd, good, so::Arena{at, room.data()}).find("Arena.device") != std::string::npos);
  CHECK(refusal(sgd, good, so::Arena{room.data(), at}).find("Arena.pinned") != std::string::npos);
  for (int k = 0; k < 100; ++k) REQUIRE(values[static_cast<std::size_t>(k)] == 1.0f);
}

TEST_CASE("A group that was set up without state cannot get momentum later", "[laws][law9][host]") {
  using Sgd = ThreadsOptimizer<so::SGD>;
  const auto messages = on_ranks(1, [](HostThreads comm) {
    Engine<Sgd> engine(table_of_sizes({10}), {.groups = {{"default", {.lr = 1}}}}, std::move(comm), 1.0);
    const auto message = message_of<std::invalid_argument>(
        [&] { engine.optimizer.set_rule("default", {.lr = 1, .momentum = 0.9}, {}); });
    engine.fill_gradients(1);
    engine.step();
    return message + (engine.parameter(3) == 0.0 ? "" : "the rule has changed");
  });
  CHECK(messages[0].find("set up without state") != std::string::npos);
  CHECK(messages[0].find("the rule has changed") == std::string::npos);
}

namespace {

/// What a rank saw around a failure.
struct Seen {
  std::string first;
  std::vector<std::string> later;
  std::string unchanged;  ///< what had changed that should not
};

/// Two good steps, then a failure of one rank's collective.
Seen break_in_step_three(HostThreads comm, const std::string& operation, int call, int failing_rank) {
  const int rank = comm.rank();
  const auto log = std::make_shared<CallLog>();
  Engine<WatchedOptimizer> engine(table_of_sizes({2000, 100}), {.sharding = {.bucket_bytes = 1}},
                                  WatchedThreads(comm.borrow(), log), 1.0);
  for (int step = 0; step < 2; ++step) {
    engine.fill_gradients(1);
    engine.step();
  }
  const auto parameters = engine.parameters;
  const auto first_moment = engine.state("exp_avg");
  Seen seen;
  if (rank == failing_rank) {
    log->fail_in = operation;
    log->fail_at = call;
  }
  engine.fill_gradients(1);
  try {
    engine.optimizer.step({}, {});
  } catch (const std::exception& error) {
    seen.first = error.what();
    if (rank == failing_rank) comm.abort(error.what());  // as an engine does whose rank has failed
  }
  auto& optimizer = engine.optimizer;
  const std::vector<std::function<void()>> calls = {
      [&] { optimizer.step({}, {}); },         [&] { optimizer.gradient_ready(so::ParameterId{0}, {}); },
      [&] { optimizer.reduce({}, {}); },       [&] { optimizer.apply({}, {}); },
      [&] { optimizer.discard({}); },          [&] { optimizer.wait_parameters(so::Host::Stream{}); },
      [&] { optimizer.zero_gradients({}); },   [&] { optimizer.set_rule("default", {}, {}); },
      [&] { optimizer.verify_parameters({}); }};
  for (const auto& each : calls) seen.later.push_back(message_of(each));
  if (engine.parameters != parameters) seen.unchanged += "parameters ";
  if (engine.state("exp_avg") != first_moment) seen.unchanged += "state ";
  return seen;
}

}  // namespace

TEST_CASE("A rank that updates nothing counts a step like those that had updates to gather",
          "[laws][law9][host]") {
  const auto iterations = on_ranks(3, [](HostThreads comm) {
    const auto log = std::make_shared<CallLog>();
    Engine<WatchedOptimizer> engine(table_of_sizes({400}), {}, WatchedThreads(comm.borrow(), log), 1.0);
    if (comm.rank() == 2 && engine.optimizer.owned().empty()) {
      log->fail_in = "all_gather";
      log->fail_at = 1;
    }
    engine.fill_gradients(1);
    try {
      engine.optimizer.step({}, {});
    } catch (const std::exception& error) {
      if (comm.rank() == 2) comm.abort(error.what());
    }
    return std::pair(message_of([&] { engine.optimizer.step({}, {}); }).empty(),
                     engine.optimizer.counters({}).iteration);
  });
  for (const auto& rank : iterations) CHECK(rank == std::pair(false, std::int64_t{1}));
}

TEST_CASE(
    "A failure before the first update leaves parameters and state, and every later call throws its cause",
    "[laws][law9][host]") {
  const int failing = GENERATE(0, 2);
  // Nine buckets (grains 0-7 of p0 and p1's) in a world of 3: three of them; the second is reduced second,
  // from the back.
  const auto [operation, call, place] =
      GENERATE(table<std::string, int, std::string>({{"reduce_scatter", 1, "the reduction of bucket 2"},
                                                     {"reduce_scatter", 2, "the reduction of bucket 1"},
                                                     {"all_reduce", 1, "the all-reduce of the norm"}}));
  CAPTURE(failing, operation, call);
  const auto seen = on_ranks(3, [&, op = operation, at = call](HostThreads comm) {
    return break_in_step_three(std::move(comm), op, at, failing);
  });
  for (std::size_t rank = 0; rank < seen.size(); ++rank) {
    CAPTURE(rank, seen[rank].first);
    CHECK(seen[rank].first.find("rank " + std::to_string(rank) + ", iteration 3, in reduce: " + place) !=
          std::string::npos);
    CHECK(seen[rank].first.find("the wire is cut") != std::string::npos);
    CHECK(seen[rank].first.find("the optimizer is broken") != std::string::npos);
    for (const std::string& later : seen[rank].later) CHECK(later == seen[rank].first);
    CHECK(seen[rank].unchanged == "");
  }
}

TEST_CASE("A failure among the updates names the bucket, and every later call throws its cause",
          "[laws][law9][host]") {
  const int call = GENERATE(1, 3);
  const auto seen = on_ranks(
      3, [&](HostThreads comm) { return break_in_step_three(std::move(comm), "all_gather", call, 1); });
  for (std::size_t rank = 0; rank < seen.size(); ++rank) {
    CAPTURE(rank, seen[rank].first);
    const std::string place = "iteration 3, in apply: the gather of bucket " + std::to_string(call - 1);
    CHECK(seen[rank].first.find(place) != std::string::npos);
    for (const std::string& later : seen[rank].later) CHECK(later == seen[rank].first);
  }
}

TEST_CASE("An observer that throws in the middle of a step breaks the optimizer with its own words",
          "[laws][law9][host]") {
  class Thrower : public so::Observer {
   public:
    void bucket_reduced(std::int64_t bucket, std::int64_t) override {
      if (bucket == 0 && armed) throw 42;
    }
    bool armed = false;
  };
  const auto messages = on_ranks(1, [](HostThreads comm) {
    Thrower thrower;
    Engine<Optimizer> engine(table_of_sizes({600}), {.sharding = {.bucket_bytes = 1}, .observer = &thrower},
                             std::move(comm), 1.0);
    thrower.armed = true;
    std::string first;
    try {
      engine.step();
    } catch (const so::Error& error) {
      first = error.what();
      try {
        std::rethrow_if_nested(error);
      } catch (const int original) {
        first += ", nested: " + std::to_string(original);
      }
    }
    const std::string again = message_of<so::Error>([&] { engine.step(); });
    return first + (first.find(again) == 0 ? "" : " DIFFERENT");
  });
  CHECK(messages[0].find("iteration 1, in reduce: the reduction of bucket 0") != std::string::npos);
  CHECK(messages[0].find(", nested: 42") != std::string::npos);
  CHECK(messages[0].find("DIFFERENT") == std::string::npos);
}

TEST_CASE("A ticket says when its optimizer is gone and when it is too old", "[laws][law9][host]") {
  const auto messages = on_ranks(1, [](HostThreads comm) {
    std::optional<so::StepTicket> first;
    std::string too_old;
    {
      Engine<Optimizer> engine(table_of_sizes({6}), {}, std::move(comm), 1.0);
      first = engine.optimizer.step({}, {});
      for (int k = 0; k < 63; ++k) engine.step();
      static_cast<void>(first->get());
      engine.step();
      too_old = message_of<so::Error>([&] { static_cast<void>(first->get()); });
      first = engine.optimizer.step({}, {});
    }
    return std::pair(too_old, message_of<so::Error>([&] { static_cast<void>(first->get()); }));
  });
  CHECK(messages[0].first.find("too old") != std::string::npos);
  CHECK(messages[0].second.find("is gone") != std::string::npos);
}
