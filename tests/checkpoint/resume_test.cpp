// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <shardopt/checkpoint.hpp>
#include <support/scratch_files.hpp>
#include <support/small_engine.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

using namespace test;
namespace checkpoint = so::checkpoint;

namespace {

using Adam = ThreadsOptimizer<so::Adam>;
using PlainEngine = Engine<Adam>;

/// Adagrad as a user writes it: its accumulator may begin elsewhere than at 0.
struct Adagrad {
  float lr = 1.0f;
  float eps = 1e-10f;
  static constexpr std::string_view name = "adagrad";
  static constexpr std::array<std::string_view, 1> state_names{"sum"};
  template <class V>
  struct State {
    V sum;
  };
  struct Constants {
    float negative_lr;
    float eps;
  };
  SHARDOPT_HD Constants constants(so::StepScalars s) const { return {so::math::mul(-lr, s.lr_factor), eps}; }
  template <class V>
  SHARDOPT_RULE static V update(Constants c, V param, V grad, State<V>& state) {
    state.sum = so::math::fma(grad, grad, state.sum);
    const V denominator = so::math::add(so::math::sqrt(state.sum), V(c.eps));
    return so::math::fma(V(c.negative_lr), so::math::div(grad, denominator), param);
  }
};

constexpr double start_lr = 1.0;

}  // namespace

TEST_CASE("The step after a resume goes on with the moments and the count",
          "[checkpoint][B036][B091][host]") {
  // The change of p in that step is known; what a loss of moments, count or both would give is far from it.
  const int when = GENERATE(0, 1, 2);  // load before any step, after one, twice
  const int world = GENERATE(1, 3);
  CAPTURE(when, world);
  const ScratchFolder folder;
  QuickFiles files;
  const Adam::Config config{.groups = {{"default", {.lr = start_lr}}}};
  const auto unbroken = on_ranks(world, [&](HostThreads comm) {
    PlainEngine engine(table_of_sizes({600}), config, std::move(comm));
    for (int step = 0; step < 100; ++step) {
      engine.fill_gradients(1);
      engine.step({.gradient_scale = 1.0f / static_cast<float>(world)});
    }
    checkpoint::save(engine.optimizer, folder.path(), {.files = &files}, {});
    engine.fill_gradients(-1);
    engine.step({.gradient_scale = 1.0f / static_cast<float>(world)});
    return engine.values();
  });
  const auto resumed = on_ranks(world, [&](HostThreads comm) {
    PlainEngine engine(table_of_sizes({600}), {.groups = {{"default", {.lr = 0.25}}}}, std::move(comm), 9);
    if (when == 1) {
      engine.fill_gradients(3);
      engine.step();
    }
    if (when == 2) checkpoint::load(engine.optimizer, folder.path(), {.files = &files}, {});
    checkpoint::load(engine.optimizer, folder.path(), {.files = &files}, {});
    const double before = engine.parameter(5);
    engine.fill_gradients(-1);
    engine.step({.gradient_scale = 1.0f / static_cast<float>(world)});
    auto values = engine.values();
    values.push_back(engine.parameter(5) - before);
    return values;
  });
  for (auto rank : resumed) {
    CHECK(rank.back() == Catch::Approx(-0.79999521).margin(2e-6 * 100));  // p is near -100: its ulp is 7.6e-6
    rank.pop_back();
    CHECK(rank == unbroken[0]);
  }
}

TEST_CASE("State that a rule begins with elsewhere than at zero can be handed in",
          "[checkpoint][B091][host]") {
  using Optimizer = ThreadsOptimizer<Adagrad>;
  const int world = GENERATE(1, 3);
  const auto values = on_ranks(world, [&](HostThreads comm) {
    Engine<Optimizer> engine(table_of_sizes({600, 5}), {.groups = {{"default", Adagrad{}}}}, std::move(comm));
    engine.optimizer.set_state("p0", "sum", std::vector<float>(600, 0.1f), {});
    engine.optimizer.set_state("p1", "sum", std::vector<float>(5, 0.1f), {});
    engine.fill_gradients(1);
    engine.step({.gradient_scale = 1.0f / static_cast<float>(world)});
    return engine.values();
  });
  for (const auto& rank : values) {
    for (const double p : rank) CHECK(p == Catch::Approx(-0.95346259).epsilon(1e-7));
  }
}

TEST_CASE("A resumed loss scale grows when the unbroken one would have", "[checkpoint][B047][host]") {
  using Optimizer = ThreadsOptimizer<so::SGD, so::Mixed<so::fp16, so::fp16, float>>;
  const int world = GENERATE(1, 3);
  const ScratchFolder folder;
  QuickFiles files;
  Optimizer::Config config{.groups = {{"default", {.lr = 0}}}};
  config.loss_scale = so::DynamicLossScale{.initial = 65536, .growth_factor = 2, .growth_interval = 10};
  static_cast<void>(on_ranks(2, [&](HostThreads comm) {
    Engine<Optimizer> engine(table_of_sizes({300}), config, std::move(comm));
    for (int step = 0; step < 8; ++step) {
      engine.fill_gradients(std::numeric_limits<double>::infinity());
      engine.step();
    }
    for (int step = 0; step < 7; ++step) {
      engine.fill_gradients(0);
      engine.step();
    }
    checkpoint::save(engine.optimizer, folder.path(), {.files = &files}, {});
    return 0;
  }));
  const auto scales = on_ranks(world, [&](HostThreads comm) {
    Engine<Optimizer> engine(table_of_sizes({300}), config, std::move(comm));
    checkpoint::load(engine.optimizer, folder.path(), {.files = &files}, {});
    std::vector<double> seen{*engine.optimizer.loss_scale()};
    const auto counters = engine.optimizer.counters({});
    for (int step = 0; step < 3; ++step) {
      engine.fill_gradients(0);
      engine.step();
      seen.push_back(*engine.optimizer.loss_scale());
    }
    seen.push_back(static_cast<double>(counters.iteration));
    seen.push_back(static_cast<double>(counters.iteration - counters.updates));  // skipped
    return seen;
  });
  for (const auto& rank : scales) CHECK(rank == std::vector<double>{256, 256, 256, 512, 15, 8});
}

TEST_CASE("Loaded weights reach the masters, and so do refreshed ones", "[checkpoint][B050][host]") {
  using Optimizer = ThreadsOptimizer<so::SGD, so::Mixed<so::bf16, so::bf16, float>>;
  const int world = GENERATE(1, 2, 5);
  const ScratchFolder folder;
  QuickFiles files;
  const auto at = [&](double start, const std::function<void(Engine<Optimizer>&)>& body) {
    return on_ranks(world, [&](HostThreads comm) {
      Engine<Optimizer> engine(table_of_sizes({700}), {.groups = {{"default", {.lr = 1}}}}, std::move(comm),
                               start);
      body(engine);
      return engine.values();
    });
  };
  const auto all = [&](const std::vector<std::vector<double>>& ranks, double value) {
    for (const auto& rank : ranks) CHECK(rank == std::vector<double>(700, value));
  };
  const auto step = [&](Engine<Optimizer>& engine, double gradient) {
    engine.fill_gradients(gradient);
    engine.step({.gradient_scale = 1.0f / static_cast<float>(world)});
  };
  at(5.0, [&](auto& engine) { checkpoint::save(engine.optimizer, folder.path(), {.files = &files}, {}); });
  const checkpoint::LoadOptions weights{.weights_only = true, .files = &files};
  all(at(0.9, [&](auto& e) { checkpoint::load(e.optimizer, folder.path(), weights, {}); }), 5.0);
  all(at(0.9,
         [&](auto& e) {
           checkpoint::load(e.optimizer, folder.path(), weights, {});
           step(e, 0);
         }),
      5.0);
  all(at(0.9,
         [&](auto& e) {
           checkpoint::load(e.optimizer, folder.path(), weights, {});
           step(e, 1);
         }),
      4.0);
  const auto overwrite = [](auto& e) {
    for (auto& p : e.parameters) p = rounded<so::bf16>(3.0);
  };
  all(at(0.9,
         [&](auto& e) {
           overwrite(e);
           e.optimizer.refresh_masters({});
           step(e, 1);
         }),
      2.0);
  // Without it the masters, which nobody told, win.
  all(at(0.5,
         [&](auto& e) {
           overwrite(e);
           step(e, 0);
         }),
      0.5);
}

TEST_CASE("Weights alone leave states, counters and hyper-parameters", "[checkpoint][host]") {
  const ScratchFolder folder;
  QuickFiles files;
  const auto seen = on_ranks(2, [&](HostThreads comm) {
    PlainEngine engine(table_of_sizes({600}), {.groups = {{"default", {.lr = 0.5}}}}, std::move(comm), 2);
    checkpoint::save(engine.optimizer, folder.path(), {.files = &files}, {});
    engine.optimizer.set_rule("default", {.lr = 0.125}, {});
    engine.fill_gradients(1);
    engine.step();
    checkpoint::load(engine.optimizer, folder.path(), {.weights_only = true, .files = &files}, {});
    const auto moments = engine.state("exp_avg");
    return std::vector<double>{
        engine.parameter(599), static_cast<double>(engine.optimizer.counters({}).updates),
        engine.optimizer.rule("default").lr, moments.empty() ? 0.2 : static_cast<double>(moments[0])};
  });
  for (const auto& rank : seen) {
    CHECK(rank[0] == 2);
    CHECK(rank[1] == 1);
    CHECK(rank[2] == 0.125);
    CHECK(rank[3] == Catch::Approx(0.2));
  }
}

TEST_CASE("fp32 values stay fp32 values through save, load and another world", "[checkpoint][B052][host]") {
  using Optimizer = ThreadsOptimizer<so::AdamW, so::Mixed<so::bf16, so::bf16, float>>;
  const int world = GENERATE(1, 2, 3);
  const ScratchFolder folder;
  QuickFiles files;
  const std::vector<std::pair<std::string, float>> given{
      {"master", 1.001f}, {"exp_avg", 0.1f}, {"exp_avg_sq", 1.2345678e-5f}};
  static_cast<void>(on_ranks(2, [&](HostThreads comm) {
    Engine<Optimizer> engine(table_of_sizes({700, 3}), {}, std::move(comm));
    for (const auto& [state, value] : given) {
      engine.optimizer.set_state("p0", state, std::vector<float>(700, value), {});
      engine.optimizer.set_state("p1", state, std::vector<float>(3, value), {});
    }
    engine.optimizer.restore_parameters({});
    checkpoint::save(engine.optimizer, folder / "first", {.files = &files}, {});
    return 0;
  }));
  const auto gathered = on_ranks(world, [&](HostThreads comm) {
    Engine<Optimizer> engine(table_of_sizes({700, 3}), {}, std::move(comm));
    checkpoint::load(engine.optimizer, folder / "first", {.files = &files}, {});
    checkpoint::save(engine.optimizer, folder / "again", {.files = &files}, {});
    std::vector<std::vector<float>> states;
    for (auto& full : engine.optimizer.gather_state(0, {})) states.push_back(std::move(full.values));
    states.push_back({static_cast<float>(engine.parameter(0))});
    return states;
  });
  REQUIRE(gathered[0].size() == 7);
  for (std::size_t k = 0; k < 2; ++k) {  // by state, in table order
    const std::size_t size = k == 0 ? 700 : 3;
    CHECK(gathered[0][k] == std::vector<float>(size, 0.1f));
    CHECK(gathered[0][2 + k] == std::vector<float>(size, 1.2345678e-5f));
    CHECK(gathered[0][4 + k] == std::vector<float>(size, 1.001f));
  }
  CHECK(gathered[0][6] == std::vector<float>{1.0f});
  const auto payload = [&](const std::string& name) {
    const checkpoint::Checkpoint saved(checkpoint::newest(folder / name, files), files);
    std::int64_t bytes = 0;
    for (const auto& file : saved.manifest().files)
      bytes += checkpoint::payload_bytes(saved.manifest(), file);
    return bytes;
  };
  CHECK(payload("first") == 703 * 12);
  CHECK(payload("again") == 703 * 12);
}

TEST_CASE("A hundred small updates of a bf16 parameter add up in its master", "[checkpoint][B052][host]") {
  using Optimizer = ThreadsOptimizer<so::SGD, so::Mixed<so::bf16, float, float>>;
  const ScratchFolder folder;
  QuickFiles files;
  const auto run = [&](HostThreads comm, int steps, bool resume) {
    Engine<Optimizer> engine(table_of_sizes({300}), {.groups = {{"default", {.lr = 1e-3}}}}, std::move(comm),
                             1);
    if (resume) checkpoint::load(engine.optimizer, folder.path(), {.files = &files}, {});
    for (int step = 0; step < steps; ++step) {
      engine.fill_gradients(0.5);
      engine.step();
    }
    if (!resume) checkpoint::save(engine.optimizer, folder.path(), {.files = &files}, {});
    return engine.parameter(299);
  };
  for (const double p : on_ranks(2, [&](HostThreads comm) { return run(std::move(comm), 37, false); }))
    CHECK(p < 1);
  for (const double p : on_ranks(2, [&](HostThreads comm) { return run(std::move(comm), 63, true); }))
    CHECK(p == 0.8984375);  // bf16 of 0.9; the parameter alone would stay at 1
}

namespace {

/// p[i] = i + 0.5, exp_avg[i] = 1000 + i, exp_avg_sq[i] = 2000 + i over the flat index.
template <class Optimizer>
void set_pattern(Optimizer& optimizer) {
  for (const auto& entry : optimizer.table().entries()) {
    const auto fill = [&](const char* state, double first) {
      std::vector<float> values(static_cast<std::size_t>(entry.numel));
      for (std::size_t i = 0; i < values.size(); ++i)
        values[i] =
            static_cast<float>(first + static_cast<double>(entry.flat.begin) + static_cast<double>(i));
      optimizer.set_state(entry.name, state, values, {});
    };
    fill("master", 0.5);
    fill("exp_avg", 1000);
    fill("exp_avg_sq", 2000);
  }
  optimizer.restore_parameters({});
}

so::ParameterTable two_groups() {
  return packed_table({{"a", {10 * grain}, "one"},
                       {"b", {3 * grain}, "two"},
                       {"c", {1}, "one"},
                       {"d", {0}, "two"},
                       {"e", {64 * grain}, "two"}});
}

const Adam::Config two_group_config{
    .groups = {{"one", {.lr = 0.1}}, {"two", {.lr = 0.01, .weight_decay = 0.5}}},
    .sharding = {.bucket_bytes = 20000}};

}  // namespace

TEST_CASE("Any world loads what any world saved, and goes on like one that never changed",
          "[checkpoint][B087][B006][host]") {
  const std::vector<int> worlds{1, 2, 3, 4, 5, 8};
  const auto steps = [](PlainEngine& engine) {
    for (int step = 0; step < 3; ++step) {
      engine.set_gradients([&](std::int64_t i) { return static_cast<double>((i * 7 + step) % 13 - 6) / 8; });
      // Powers of two and equal gradients on all ranks: their mean is exact at every world.
      engine.step({.gradient_scale = 1.0f / static_cast<float>(engine.optimizer.world())});
    }
    return engine.values();
  };
  const ScratchFolder folder;
  QuickFiles files;
  const auto never_changed = on_ranks(1, [&](HostThreads comm) {
    PlainEngine engine(two_groups(), two_group_config, std::move(comm));
    set_pattern(engine.optimizer);
    return steps(engine);
  });
  for (const int world : worlds) {
    static_cast<void>(on_ranks(world, [&](HostThreads comm) {
      PlainEngine engine(two_groups(), two_group_config, std::move(comm));
      set_pattern(engine.optimizer);
      checkpoint::save(
          engine.optimizer, folder / std::to_string(world),
          {.rank_extra = "generator of " + std::to_string(engine.optimizer.rank()), .files = &files}, {});
      return 0;
    }));
    for (const int other : worlds) {
      CAPTURE(world, other);
      const auto loaded = on_ranks(other, [&](HostThreads comm) {
        PlainEngine engine(two_groups(), two_group_config, std::move(comm));
        const auto report =
            checkpoint::load(engine.optimizer, folder / std::to_string(world), {.files = &files}, {});
        std::vector<float> states;
        for (const auto& full : engine.optimizer.gather_state(0, {}))
          states.insert(states.end(), full.values.begin(), full.values.end());
        const auto values = engine.values();
        std::string told = report.rank_extra;
        for (const auto& note : report.notes) told += "|" + note;
        // At other worlds than powers of two the mean rounds: the steps are compared where it does not.
        const bool exact = (other & (other - 1)) == 0;
        return std::tuple(states, values, told, exact ? steps(engine) : std::vector<double>());
      });
      const auto elements = static_cast<std::size_t>(two_groups().trainable_elements());
      const auto& states = std::get<0>(loaded[0]);
      REQUIRE(states.size() == 3 * elements);
      int wrong = 0;
      for (std::size_t i = 0; i < elements; ++i) {
        wrong += states[i] != 1000 + static_cast<float>(i) ||
                 states[elements + i] != 2000 + static_cast<float>(i) ||
                 states[2 * elements + i] != static_cast<float>(static_cast<double>(i) + 0.5);
      }
      CHECK(wrong == 0);
      for (std::size_t rank = 0; rank < loaded.size(); ++rank) {
        CHECK(std::get<1>(loaded[rank])[17] == 17.5);
        const auto& told = std::get<2>(loaded[rank]);
        if (world == other) {
          CHECK(told == "generator of " + std::to_string(rank));
        } else {
          CHECK(told.find("texts of single ranks were not given back") != std::string::npos);
        }
        if (!std::get<3>(loaded[rank]).empty()) CHECK(std::get<3>(loaded[rank]) == never_changed[0]);
      }
    }
  }
}

TEST_CASE("States follow the names, not the places in the table", "[checkpoint][B089][host]") {
  const auto table = [](const std::vector<std::string>& names) {
    std::vector<Packed> tensors;
    for (const auto& name : names) tensors.push_back({name, {6}, name == "a" || name == "b" ? "one" : "two"});
    return packed_table(tensors);
  };
  const ScratchFolder folder;
  QuickFiles files;
  static_cast<void>(on_ranks(2, [&](HostThreads comm) {
    PlainEngine engine(table({"a", "b", "c", "d"}), two_group_config, std::move(comm));
    float value = 1;
    for (const char* name : {"a", "b", "c", "d"})
      engine.optimizer.set_state(name, "exp_avg", std::vector<float>(6, value++), {});
    checkpoint::save(engine.optimizer, folder.path(), {.files = &files}, {});
    return 0;
  }));
  for (const std::vector<std::string>& names :
       {std::vector<std::string>{"b", "a", "d", "c"}, {"c", "d", "a", "b"}, {"a", "c", "b", "d"}}) {
    CAPTURE(names);
    const auto moments = on_ranks(3, [&](HostThreads comm) {
      PlainEngine engine(table(names), two_group_config, std::move(comm));
      const auto report = checkpoint::load(engine.optimizer, folder.path(), {.files = &files}, {});
      std::vector<float> seen;
      for (const auto& full : engine.optimizer.gather_state(0, {})) {
        if (full.state == "exp_avg") seen.push_back(full.values[5]);
      }
      seen.push_back(static_cast<float>(report.notes.size()));
      return seen;
    });
    std::vector<float> expected;
    for (const auto& name : names) expected.push_back(static_cast<float>(name[0] - 'a' + 1));
    expected.push_back(1);  // the order is noted
    CHECK(moments[0] == expected);
  }
}

TEST_CASE("What differs from the checkpoint is listed, and nothing is changed", "[checkpoint][B089][host]") {
  const ScratchFolder folder;
  QuickFiles files;
  const std::vector<Packed> saved{{"a", {6}, "one"}, {"b", {2, 3}, "two"}, {"c", {5}, "two"}};
  static_cast<void>(on_ranks(2, [&](HostThreads comm) {
    PlainEngine engine(packed_table(saved), two_group_config, std::move(comm), 3);
    checkpoint::save(engine.optimizer, folder.path(), {.files = &files}, {});
    return 0;
  }));
  struct Case {
    std::vector<Packed> here;
    std::vector<const char*> told;
  };
  const std::vector<Case> cases{
      {{{"a", {6}, "one"}, {"x", {2, 3}, "two"}, {"c", {5}, "two"}},
       {"parameter 'x' is not in the checkpoint", "parameter 'b' is in the checkpoint only"}},
      {{{"a", {6}, "one"}, {"b", {3, 2}, "two"}, {"c", {5}, "one"}},
       {"parameter 'b': shape: [2, 3] in the checkpoint, [3, 2] here",
        "parameter 'c': group: 'two' in the checkpoint, 'one' here"}},
      {{{"a", {6}, "one"}, {"b", {2, 3}, "two"}, {"c", {5}, "two", true}},
       {"parameter 'c': trainable in the checkpoint, frozen here"}}};
  for (const Case& c : cases) {
    const auto told = on_ranks(2, [&](HostThreads comm) {
      PlainEngine engine(packed_table(c.here), two_group_config, std::move(comm), 1);
      const std::string message = message_of<so::CheckpointError>(
          [&] { checkpoint::load(engine.optimizer, folder.path(), {.files = &files}, {}); });
      const bool unchanged = engine.values() == std::vector<double>(engine.parameters.size(), 1.0) &&
                             engine.optimizer.counters({}).iteration == 0 &&
                             engine.optimizer.rule("one").lr == 0.1;
      checkpoint::LoadOptions lenient{.lenient = true, .files = &files};
      const auto report = checkpoint::load(engine.optimizer, folder.path(), lenient, {});
      return std::tuple(message, unchanged ? 1 : 0, engine.parameter(0), report.notes.size());
    });
    for (const auto& [message, unchanged, first, notes] : told) {
      CAPTURE(message);
      for (const char* part : c.told) CHECK(message.find(part) != std::string::npos);
      CHECK(unchanged == 1);
      CHECK(first == 3);
      CHECK(notes >= c.told.size());
    }
  }
}

TEST_CASE("A group that only the checkpoint has is a difference", "[checkpoint][host]") {
  const ScratchFolder folder;
  QuickFiles files;
  const so::ParameterTable table = packed_table({{"a", {6}, "one"}});
  static_cast<void>(on_ranks(2, [&](HostThreads comm) {
    PlainEngine engine(table, two_group_config, std::move(comm), 3);
    checkpoint::save(engine.optimizer, folder.path(), {.files = &files}, {});
    return 0;
  }));
  const std::string difference = "group 'two' is in the checkpoint only";
  const auto told = on_ranks(2, [&](HostThreads comm) {
    PlainEngine engine(table, {.groups = {{"one", {.lr = 0.1}}}}, std::move(comm), 1);
    const std::string message = message_of<so::CheckpointError>(
        [&] { checkpoint::load(engine.optimizer, folder.path(), {.files = &files}, {}); });
    checkpoint::LoadOptions lenient{.lenient = true, .files = &files};
    const auto notes = checkpoint::load(engine.optimizer, folder.path(), lenient, {}).notes;
    return std::pair(message, std::count(notes.begin(), notes.end(), difference));
  });
  for (const auto& [message, notes] : told) {
    CAPTURE(message);
    CHECK(message.find(difference) != std::string::npos);
    CHECK(notes == 1);
  }
}

TEST_CASE("Another rule's checkpoint is refused by name", "[checkpoint][host]") {
  const ScratchFolder folder;
  QuickFiles files;
  const auto told = on_ranks(2, [&](HostThreads comm) {
    Engine<ThreadsOptimizer<Adagrad>> engine(table_of_sizes({300}), {.groups = {{"default", Adagrad{}}}},
                                             comm.borrow());
    checkpoint::save(engine.optimizer, folder.path(), {.files = &files}, {});
    PlainEngine other(table_of_sizes({300}), {}, std::move(comm));
    return message_of<so::CheckpointError>(
        [&] { checkpoint::load(other.optimizer, folder.path(), {.files = &files}, {}); });
  });
  for (const auto& message : told) {
    CAPTURE(message);
    CHECK(message.find("rule: 'adagrad' version 1 in the checkpoint, 'adam' version 1 here") !=
          std::string::npos);
    CHECK(message.find("state 'exp_avg' is not in the checkpoint") != std::string::npos);
    CHECK(message.find("state 'sum' is in the checkpoint only") != std::string::npos);
  }
}
