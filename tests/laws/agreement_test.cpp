// SPDX-License-Identifier: Apache-2.0
// Law 6: what ranks set up differently is an error on every rank, and what drifts apart later shows in the
// ticket.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <support/small_engine.hpp>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

using namespace test;

namespace {

using Optimizer = ThreadsOptimizer<so::AdamW>;

/// What a rank brings; all alike at first.
struct Brought {
  std::vector<Packed> tensors = {{"a", {300}, "x"},
                                 {"b", {20, 30}, "y"},
                                 {"c", {7}, "x", true},
                                 {"d", {300}, "x", false, "a"},
                                 {"e", {512}, "y"}};
  Optimizer::Config config = {
      .groups = {{"x", {}}, {"y", {.lr = 0.5}}}, .sharding = {.bucket_bytes = 1}, .max_norm = 1};
  std::int64_t shift = 0;  ///< of all offsets
};

so::ParameterTable shifted(const so::ParameterTable& table, std::int64_t shift) {
  so::ParameterTable result;
  for (const auto& entry : table.entries()) {
    so::ParameterInfo info{
        .name = entry.name, .shape = entry.shape, .group = entry.group, .frozen = entry.frozen};
    if (entry.alias_of) info.alias_of = table[*entry.alias_of].name;
    if (!entry.alias_of) info.offset = entry.offset + shift;
    result.add(info);
  }
  return result;
}

struct Mismatch {
  const char* what;
  std::function<void(Brought&)> change;
  std::vector<const char*> told;  ///< parts of the message
};

const std::vector<Mismatch>& mismatches() {
  static const std::vector<Mismatch> all = {
      {"a name",
       [](Brought& b) { b.tensors[1].name = "other"; },
       {"parameter 1: 'b'", "parameter 1: 'other'"}},
      {"a shape of the same size",
       [](Brought& b) {
         b.tensors[1].shape = {30, 20};
       },
       {"[20, 30]", "[30, 20]"}},
      {"a size", [](Brought& b) { b.tensors[4].shape = {513}; }, {"'e' [512]", "'e' [513]"}},
      {"a parameter's group",
       [](Brought& b) { b.tensors[4].group = "x"; },
       {"'e'", "group 'x'", "group 'y'"}},
      {"a frozen parameter", [](Brought& b) { b.tensors[0].frozen = true; }, {"'a'", "frozen"}},
      {"an alias that is a parameter",
       [](Brought& b) { b.tensors[3].alias_of = ""; },
       {"'d'", "alias of 'a'"}},
      {"one parameter more",
       [](Brought& b) {
         b.tensors.push_back({"f", {0}, "x"});
       },
       {"parameter 5: 'f'"}},
      {"one parameter less", [](Brought& b) { b.tensors.pop_back(); }, {"parameter 4: 'e'"}},
      {"the order of parameters",
       [](Brought& b) { std::swap(b.tensors[1], b.tensors[4]); },
       {"parameter 1: 'b'", "parameter 1: 'e'"}},
      {"an offset", [](Brought& b) { b.shift = 8; }, {"offset 0", "offset 8"}},
      {"a group's name",
       [](Brought& b) {
         b.config.groups.push_back({"z", {}});
       },
       {"group 'z'"}},
      {"the order of groups",
       [](Brought& b) { std::swap(b.config.groups[0], b.config.groups[1]); },
       {"group 'x'", "group 'y'"}},
      {"a learning rate",
       [](Brought& b) { b.config.groups[1].rule.lr = 0.25; },
       {"group 'y'", "0.5", "0.25"}},
      {"a learning rate by one bit",
       [](Brought& b) { b.config.groups[1].rule.lr = std::nextafter(0.5, 1); },
       {"group 'y'"}},
      {"a tiny epsilon", [](Brought& b) { b.config.groups[0].rule.eps = 2e-8; }, {"group 'x'", "e-08"}},
      {"a beta",
       [](Brought& b) { b.config.groups[0].rule.beta2 = 0.9999; },
       {"group 'x'", "0.999", "0.9999"}},
      {"a flag", [](Brought& b) { b.config.groups[0].rule.maximize = true; }, {"group 'x'"}},
      {"the bucket size", [](Brought& b) { b.config.sharding.bucket_bytes = 1 << 20; }, {"bucket"}},
      {"max_norm", [](Brought& b) { b.config.max_norm = 2; }, {"max_norm 1", "max_norm 2"}},
      {"max_norm by one bit",
       [](Brought& b) { b.config.max_norm = std::nextafter(1.0f, 2.0f); },
       {"max_norm 1"}},
      {"no clipping",
       [](Brought& b) { b.config.max_norm = std::numeric_limits<float>::infinity(); },
       {"max_norm 1", "max_norm inf"}},
      {"clip_epsilon", [](Brought& b) { b.config.clip_epsilon = 1e-12f; }, {"clip_epsilon"}},
      {"non_finite", [](Brought& b) { b.config.non_finite = so::NonFinite::propagate; }, {"non_finite"}},
      {"count_skipped_updates",
       [](Brought& b) { b.config.count_skipped_updates = true; },
       {"count_skipped_updates"}},
      {"initial_parameters",
       [](Brought& b) { b.config.initial_parameters = so::InitialParameters::trust; },
       {"initial_parameters"}},
  };
  return all;
}

template <class Other = Optimizer>
void start(const Brought& brought, HostThreads comm) {
  const auto table = shifted(packed_table(brought.tensors), brought.shift);
  typename Other::Config config;
  config.groups.clear();
  for (const auto& group : brought.config.groups) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(config.groups[0].rule)>, so::AdamW>) {
      config.groups.push_back(group);
    } else {
      config.groups.push_back({group.name, {}});
    }
  }
  config.sharding.bucket_bytes = brought.config.sharding.bucket_bytes;
  config.max_norm = brought.config.max_norm;
  config.clip_epsilon = brought.config.clip_epsilon;
  config.non_finite = brought.config.non_finite;
  config.count_skipped_updates = brought.config.count_skipped_updates;
  config.initial_parameters = brought.config.initial_parameters;
  Engine<Other> engine(table, config, std::move(comm));
}

void require_told(const std::vector<std::string>& messages, const std::vector<const char*>& told) {
  REQUIRE(all_same(messages));
  CAPTURE(messages.front());
  REQUIRE(messages.front().find("ranks are set up differently") != std::string::npos);
  for (const char* part : told) {
    CAPTURE(part);
    CHECK(messages.front().find(part) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("Ranks that are set up alike start", "[laws][law6][host]") {
  const int world = GENERATE(1, 2, 5);
  for (const std::string& message :
       messages_of_ranks(world, [](HostThreads comm) { start({}, std::move(comm)); }))
    CHECK(message == "");
}

TEST_CASE("Whatever ranks set up differently, every rank names the first difference and the ranks",
          "[laws][law6][host][B024]") {
  const int odd = GENERATE(0, 2, 3);
  for (const Mismatch& mismatch : mismatches()) {
    CAPTURE(mismatch.what, odd);
    const auto messages = messages_of_ranks<so::CollectiveError>(4, [&](HostThreads comm) {
      Brought brought;
      if (comm.rank() == odd) mismatch.change(brought);
      start(brought, std::move(comm));
    });
    require_told(messages, mismatch.told);
    const std::string alone = "rank " + std::to_string(odd) + ": '";
    CHECK(messages.front().find(alone) != std::string::npos);
    const std::string others = odd == 0   ? "rank 1, 2, 3: '"
                               : odd == 2 ? "rank 0, 1, 3: '"
                                          : "rank 0, 1, 2: '";
    CHECK(messages.front().find(others) != std::string::npos);
  }
}

namespace {

/// Rank 1 is an optimizer of another type.
template <class Other>
std::vector<std::string> beside() {
  return messages_of_ranks<so::CollectiveError>(3, [](HostThreads comm) {
    const Brought brought;
    if (comm.rank() == 1) {
      start<Other>(brought, std::move(comm));
    } else {
      start<Optimizer>(brought, std::move(comm));
    }
  });
}

}  // namespace

TEST_CASE("Ranks with different policies, precisions or rules refuse each other", "[laws][law6][host]") {
  require_told(beside<ThreadsOptimizer<so::AdamW, so::FullPrecision, so::PerParameterSharding>>(),
               {"sharding flat", "sharding per-parameter"});
  require_told(beside<ThreadsOptimizer<so::AdamW, so::FullPrecision, so::Replicated>>(),
               {"sharding replicated"});
  require_told(beside<ThreadsOptimizer<so::AdamW, so::Mixed<so::bf16, float, float>>>(),
               {"precision fp32/fp32/fp32", "precision bf16/fp32/fp32"});
  require_told(beside<ThreadsOptimizer<so::Adam>>(), {"adamw", "adam "});
}

namespace {

/// Gives each rank two grains of four: neighbours, or every other one.
struct TurnedSharding {
  int turned = 0;

  static constexpr std::string_view name = "turned";
  static constexpr bool updates_everything = false;

  [[nodiscard]] so::ShardPlan plan(const so::FlatSpace& space, int, std::int64_t) const {
    so::ShardPlan plan{.buckets = {{0, space.elements}}, .runs = {}};
    for (int k = 0; k < 4; ++k)
      plan.runs.push_back({{k * grain, (k + 1) * grain}, turned != 0 ? k / 2 : k % 2});
    return plan;
  }
};
static_assert(so::ShardingPolicy<TurnedSharding>);

/// A rule with a number that a double cannot hold.
struct SeededRule {
  double lr = 0;
  std::uint64_t seed = 0;

  template <class V>
  struct State {};
  struct Constants {
    float factor;
  };
  [[nodiscard]] SHARDOPT_HD Constants constants(so::StepScalars) const {
    return {static_cast<float>(seed & 1)};
  }
  template <class V>
  [[nodiscard]] SHARDOPT_RULE static V update(Constants c, V param, V grad, State<V>&) {
    return so::math::fma(c.factor, grad, param);
  }
};
static_assert(so::OptimizerRule<SeededRule>);

/// A rule that was changed, and says so.
template <int revision>
struct Revised {
  static constexpr std::string_view name = "revised";
  static constexpr int version = revision;
  double lr = 0;

  template <class V>
  struct State {};
  struct Constants {
    float factor;
  };
  [[nodiscard]] SHARDOPT_HD Constants constants(so::StepScalars) const { return {static_cast<float>(lr)}; }
  template <class V>
  [[nodiscard]] SHARDOPT_RULE static V update(Constants c, V param, V grad, State<V>&) {
    return so::math::fma(c.factor, grad, param);
  }
};
static_assert(so::OptimizerRule<Revised<2>>);

}  // namespace

TEST_CASE("Ranks whose policies deal the same number of elements differently refuse each other",
          "[laws][law6][host]") {
  using Turned = ThreadsOptimizer<so::SGD, so::FullPrecision, TurnedSharding>;
  const auto start_turned = [](int odd) {
    return messages_of_ranks<so::CollectiveError>(2, [&](HostThreads comm) {
      const int turned = comm.rank() == odd ? 1 : 0;
      Engine<Turned> engine(table_of_sizes({4 * grain}), {.sharding = {turned}}, std::move(comm));
    });
  };
  CHECK(start_turned(-1) == std::vector<std::string>(2));
  require_told(start_turned(1), {"bucket at 0: 0 512 1024, owners"});
}

TEST_CASE(
    "Hyper-parameters that differ by one beyond what a double holds are told at the start and in tickets",
    "[laws][law6][host]") {
  using Seeded = ThreadsOptimizer<SeededRule>;
  constexpr std::uint64_t large = std::uint64_t{1} << 60;
  require_told(messages_of_ranks<so::CollectiveError>(
                   2,
                   [](HostThreads comm) {
                     const std::uint64_t seed = large + (comm.rank() == 0 ? 0 : 1);
                     Engine<Seeded> engine(table_of_sizes({4}), {.groups = {{"default", {.seed = seed}}}},
                                           std::move(comm));
                   }),
               {"1152921504606846976", "1152921504606846977"});
  const auto differ = on_ranks(2, [](HostThreads comm) {
    const std::uint64_t seed = large + (comm.rank() == 0 ? 0 : 1);
    Engine<Seeded> engine(table_of_sizes({4}), {}, std::move(comm));
    const int before = engine.step().inputs_differ ? 1 : 0;
    engine.optimizer.set_rule("default", {.seed = seed}, {});
    return std::pair(before, engine.step().inputs_differ ? 1 : 0);
  });
  for (const auto& rank : differ) CHECK(rank == std::pair(0, 1));
}

TEST_CASE("Versions of a rule that differ are told at the start", "[laws][law6][host]") {
  require_told(messages_of_ranks<so::CollectiveError>(
                   2,
                   [](HostThreads comm) {
                     if (comm.rank() == 0) {
                       Engine<ThreadsOptimizer<Revised<1>>> engine(table_of_sizes({4}), {}, std::move(comm));
                     } else {
                       Engine<ThreadsOptimizer<Revised<2>>> engine(table_of_sizes({4}), {}, std::move(comm));
                     }
                   }),
               {"rule revised version 1", "rule revised version 2"});
}

TEST_CASE("Ranks that register parameters in different orders are told the first one, for every order",
          "[laws][law6][host][B024][B070]") {
  // Twenty shufflings: none may be accepted, none may hang.
  for (std::uint64_t round = 0; round < 20; ++round) {
    const auto messages = messages_of_ranks<so::CollectiveError>(2, [&](HostThreads comm) {
      std::vector<Packed> tensors = {{"a", {300}}, {"b", {300}}, {"c", {300}}, {"d", {300}}};
      if (comm.rank() == 1) {
        for (std::size_t k = tensors.size(); k > 1; --k)
          std::swap(tensors[k - 1], tensors[noise(21, round, k) % k]);
        if (tensors[0].name == "a" && tensors[1].name == "b" && tensors[2].name == "c")
          std::swap(tensors[0], tensors[3]);
      }
      Engine<Optimizer> engine(packed_table(tensors), {}, std::move(comm));
    });
    CAPTURE(round);
    require_told(messages, {"parameter "});
  }
}

TEST_CASE("Parameters that differ at the start are an error on every rank, by default",
          "[laws][law6][host]") {
  const std::vector<Packed> tensors = {{"a", {300}}, {"still", {9}, "default", true}, {"b", {700}}};
  struct Difference {
    std::int64_t at;
    const char* name;
    float is, should;
  };
  const auto difference = GENERATE(Difference{0, "'a'", 1, 2}, Difference{299, "'a'", 0.0f, -0.0f},
                                   Difference{305, "'still'", 1, 2}, Difference{1008, "'b'", 3, 3.0000002f},
                                   Difference{309, "'b'", std::numeric_limits<float>::quiet_NaN(), 1});
  CAPTURE(difference.at);
  const auto table = packed_table(tensors);
  const auto run = [&](so::InitialParameters initial, std::vector<std::vector<float>>& after) {
    after.assign(3, {});
    return messages_of_ranks<so::CollectiveError>(3, [&](HostThreads comm) {
      std::vector<float> parameters(1009, 1.0f);
      std::vector<float> gradients(1009, 0.0f);
      const auto rank = static_cast<std::size_t>(comm.rank());
      parameters[static_cast<std::size_t>(difference.at)] = rank == 1 ? difference.is : difference.should;
      std::string error;
      try {
        Optimizer optimizer(table, {.initial_parameters = initial}, std::move(comm),
                            so::FlatBuffers{parameters.data(), gradients.data()}, {});
      } catch (...) {
        after[rank] = parameters;
        throw;
      }
      after[rank] = parameters;
    });
  };
  std::vector<std::vector<float>> after;
  const auto messages = run(so::InitialParameters::verify, after);
  REQUIRE(all_same(messages));
  CHECK(messages[0].find(std::string("ranks hold different values of parameter ") + difference.name) !=
        std::string::npos);
  CHECK(bits_of(after[1][static_cast<std::size_t>(difference.at)]) == bits_of(difference.is));

  for (const std::string& message : run(so::InitialParameters::broadcast, after)) CHECK(message == "");
  for (const auto& parameters : after)
    CHECK(bits_of(parameters[static_cast<std::size_t>(difference.at)]) == bits_of(difference.should));

  for (const std::string& message : run(so::InitialParameters::trust, after)) CHECK(message == "");
  CHECK(bits_of(after[1][static_cast<std::size_t>(difference.at)]) == bits_of(difference.is));
  CHECK(bits_of(after[2][static_cast<std::size_t>(difference.at)]) == bits_of(difference.should));
}

TEST_CASE("Masters follow the parameters that the start agreed on", "[laws][law6][host]") {
  using Bf16 = ThreadsOptimizer<so::SGD, so::Mixed<so::bf16, so::bf16, float>>;
  const auto values = on_ranks(3, [](HostThreads comm) {
    const double mine = 2.0 + comm.rank();
    Engine<Bf16> engine(
        table_of_sizes({1000}),
        {.groups = {{"default", {.lr = 1}}}, .initial_parameters = so::InitialParameters::broadcast},
        std::move(comm), mine);
    engine.step();
    return engine.values();
  });
  for (const auto& rank : values) CHECK(rank == std::vector<double>(1000, 2.0));
}

TEST_CASE("Hyper-parameters, factors and scales that drift apart show in every rank's ticket",
          "[laws][law6][host]") {
  enum Drift { none, learning_rate, last_bit, weight_decay, factor, scale, only_one_is_different };
  const int drift = GENERATE(0, 1, 2, 3, 4, 5, 6);
  const int world = GENERATE(1, 2, 3, 8);
  CAPTURE(drift, world);
  const auto shown = on_ranks(world, [&](HostThreads comm) {
    const bool odd = comm.rank() == world - 1;
    Engine<Optimizer> engine(table_of_sizes({1000}), {.groups = {{"default", {.lr = 0.5}}}}, std::move(comm),
                             1.0);
    std::string seen = engine.step().inputs_differ ? "1" : "0";
    so::AdamW rule = engine.optimizer.rule("default");
    so::StepOptions options;
    if (odd) {
      if (drift == learning_rate) rule.lr = 0.25;
      if (drift == last_bit) rule.lr = std::nextafter(rule.lr, 1);
      if (drift == weight_decay) rule.weight_decay = 0.5;
      if (drift == factor) options.lr_factor = 0.5f;
      if (drift == scale) options.gradient_scale = 0.5f;
      if (drift == only_one_is_different) rule.maximize = true;
    }
    engine.optimizer.set_rule("default", rule, {});
    seen += engine.step(options).inputs_differ ? "1" : "0";
    engine.optimizer.set_rule("default", {.lr = 0.125}, {});
    seen += engine.step().inputs_differ ? "1" : "0";
    return seen;
  });
  for (const std::string& rank : shown) CHECK(rank == (drift == none || world == 1 ? "000" : "010"));
}

TEST_CASE("verify_parameters finds a parameter that one rank changed behind the optimizer's back",
          "[laws][law6][host]") {
  const auto messages = messages_of_ranks<so::CollectiveError>(3, [](HostThreads comm) {
    const bool odd = comm.rank() == 2;
    Engine<Optimizer> engine(table_of_sizes({1000, 77}), {}, std::move(comm), 1.0);
    engine.step();
    engine.optimizer.verify_parameters({});
    if (odd) engine.parameters[1076] = 3.0f;
    engine.optimizer.verify_parameters({});
  });
  for (const std::string& message : messages)
    CHECK(message.find("ranks hold different values of parameter 'p1'") != std::string::npos);
}
