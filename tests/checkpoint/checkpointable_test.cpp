// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_test_macros.hpp>
#include <support/checkpoint_engine.hpp>
#include <support/durable_files.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

using namespace test;

namespace {

static_assert(ckpt::Checkpointable<CheckpointAdam>);
static_assert(
    ckpt::Checkpointable<ThreadsOptimizer<so::SGD, so::Mixed<so::bf16, float, float>, so::Replicated>>);

/// The least that models Checkpointable: one rank, one group, one state beside the parameters.
struct Minimal {
  using Device = so::Host;
  using Stream = so::Host::Stream;
  using Param = float;
  using Grad = float;
  struct Run {
    std::string_view state;
    std::string_view parameter;
    so::Range range;
    float* data;
  };
  struct Counters {
    std::int64_t iteration = 0;
    std::int64_t updates = 0;
    float loss_scale = 1;
    std::int64_t loss_scale_good_steps = 0;
    std::int32_t loss_scale_hysteresis = 0;
  };
  struct Group {
    std::string name;
    so::SGD rule;
  };
  struct Config {
    std::vector<Group> groups = {{"default", {}}};
    std::optional<float> loss_scale = {};
    so::FlatSharding sharding = {};
  };
  struct Buffer {
    std::string name = "momentum";
  };
  struct Plan {
    std::vector<Buffer> buffers = {{}};
  };

  [[nodiscard]] int rank() const { return 0; }
  [[nodiscard]] int world() const { return 1; }
  [[nodiscard]] const so::ParameterTable& table() const { return table_; }
  [[nodiscard]] const Config& config() const { return config_; }
  [[nodiscard]] Plan memory_plan() const { return {}; }
  [[nodiscard]] Device device() const { return {}; }
  [[nodiscard]] std::span<std::byte> transfer_memory() { return transfer_; }
  [[nodiscard]] std::vector<Run> states() const {
    return {{"momentum", "p0", {0, 5}, momentum_}, {"master", "p0", {0, 5}, parameters_}};
  }
  [[nodiscard]] std::vector<Run> owned_states() const { return states(); }
  [[nodiscard]] Counters counters(Stream) const { return counters_; }
  [[nodiscard]] so::SGD rule(std::string_view) const { return config_.groups[0].rule; }
  void require_rule(std::string_view, const so::SGD&) const {}
  void require_between_steps(std::string_view) const {}
  [[nodiscard]] std::vector<std::string> exchange(const std::string& mine) { return {mine}; }
  void set_rule(std::string_view, const so::SGD& rule, Stream) { config_.groups[0].rule = rule; }
  void set_counters(const Counters& counters, Stream) { counters_ = counters; }
  void set_states(const std::vector<Run>& runs, std::span<const float> values, Stream) {
    for (const Run& run : runs) {
      for (std::int64_t i = 0; i < run.range.size(); ++i) run.data[i] = values[static_cast<std::size_t>(i)];
      values = values.subspan(static_cast<std::size_t>(run.range.size()));
    }
  }
  void restore_parameters(Stream) {}
  void wait_parameters(Stream) const {}
  void synchronize(Stream) {}

  so::ParameterTable table_ = table_of_sizes({5});
  Config config_ = {};
  Counters counters_ = {};
  float* parameters_ = nullptr;
  float* momentum_ = nullptr;
  std::vector<std::byte> transfer_ = std::vector<std::byte>(4096);
};
static_assert(ckpt::Checkpointable<Minimal>);

// Near misses: a member that is not there, or does not do what is asked.
struct WithoutDevice : Minimal {
  void device() const = delete;
};
static_assert(!ckpt::Checkpointable<WithoutDevice>);
struct WithoutRule : Minimal {
  void rule(std::string_view) const = delete;
};
static_assert(!ckpt::Checkpointable<WithoutRule>);
struct WithoutRequireRule : Minimal {
  void require_rule(std::string_view, const so::SGD&) const = delete;
};
static_assert(!ckpt::Checkpointable<WithoutRequireRule>);
struct WithoutSetRule : Minimal {
  void set_rule(std::string_view, const so::SGD&, Stream) = delete;
};
static_assert(!ckpt::Checkpointable<WithoutSetRule>);
struct WithoutSetStates : Minimal {
  void set_states(const std::vector<Run>&, std::span<const float>, Stream) = delete;
};
static_assert(!ckpt::Checkpointable<WithoutSetStates>);
struct WithoutMemoryPlan : Minimal {
  void memory_plan() const = delete;
};
static_assert(!ckpt::Checkpointable<WithoutMemoryPlan>);
struct ExchangesOneText : Minimal {
  [[nodiscard]] std::string exchange(const std::string& mine) { return mine; }
};
static_assert(!ckpt::Checkpointable<ExchangesOneText>);
struct WithoutLossScale : Minimal {
  struct Config {
    std::vector<Group> groups;
    so::FlatSharding sharding;
  };
  [[nodiscard]] Config config() const { return {}; }
};
static_assert(!ckpt::Checkpointable<WithoutLossScale>);
struct RuleIsNone : Minimal {
  struct Unruly {
    std::string name;
    int rule = 0;
  };
  struct Config {
    std::vector<Unruly> groups;
    std::optional<float> loss_scale;
    so::FlatSharding sharding;
  };
  [[nodiscard]] Config config() const { return {}; }
};
static_assert(!ckpt::Checkpointable<RuleIsNone>);
static_assert(!ckpt::Checkpointable<int>);

}  // namespace

TEST_CASE("Whatever models Checkpointable is saved and loaded", "[checkpoint][host]") {
  std::vector<float> parameters = {1, 2, 3, 4, 5};
  std::vector<float> momentum = {6, 7, 8, 9, 10};
  Minimal optimizer;
  optimizer.parameters_ = parameters.data();
  optimizer.momentum_ = momentum.data();
  optimizer.counters_.updates = 3;
  optimizer.config_.groups[0].rule.lr = 0.25f;
  DurableFiles files;
  ckpt::save(optimizer, "/runs/a", {.files = &files}, {});
  const auto saved = std::pair(parameters, momentum);
  parameters.assign(5, 0.0f);
  momentum.assign(5, 0.0f);
  optimizer.counters_ = {};
  optimizer.config_ = {};
  ckpt::load(optimizer, "/runs/a", {.files = &files}, {});
  CHECK(std::pair(parameters, momentum) == saved);
  CHECK(optimizer.counters_.updates == 3);
  CHECK(optimizer.config_.groups[0].rule.lr == 0.25f);
}
