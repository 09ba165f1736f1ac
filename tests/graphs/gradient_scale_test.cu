// SPDX-License-Identifier: Apache-2.0
#include <shardopt/cuda.cuh>

#include <support/captured_graph.hpp>
#include <support/cuda_ranks.hpp>
#include <support/numbers.hpp>
#include <support/require_devices.hpp>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

using namespace test;

namespace {

template <class Rule, class Comm, class Precision>
using Optimizer = so::ZeroOptimizer<Rule, so::FlatSharding, Comm, Precision>;

/// Two parameters with gaps, at odd places: slices begin anywhere.
constexpr std::int64_t extent = 1900;
so::ParameterTable make_table() {
  so::ParameterTable table;
  table.add({.name = "a", .shape = {1031}, .offset = 3});
  table.add({.name = "b", .shape = {7, 113}, .offset = 1040});
  return table;
}

/// How a step gets its scale. In replays set_inputs gets the pointer, only once, or by turns with values.
enum class Way { value, pointer, in_replays, by_turns_in_replays };

/// One rank's engine on a GPU, which computes the scale of a step when all its gradients have been announced.
template <class Rule, class Precision>
class GpuEngine {
 public:
  using Sharded = Optimizer<Rule, so::Nccl, Precision>;
  using Param = typename Precision::Param;
  using Grad = typename Precision::Grad;

  GpuEngine(ncclComm_t comm, const typename Sharded::Config& config, const std::vector<Param>& start) {
    parameters_.write(start, stream_);
    gradients_.fill(0, stream_);
    optimizer_.emplace(make_table(), config, so::Nccl::borrow(comm, communication_),
                       so::FlatBuffers{parameters_.data(), gradients_.data()}, stream_);
  }

  so::StepTicket step(const std::vector<Grad>& gradients, float scale, Way way) {
    gradients_.write(gradients, stream_);
    if (way == Way::value) return optimizer_->step({.gradient_scale = scale}, stream_);
    const bool by_value = way == Way::by_turns_in_replays && std::exchange(by_value_, !by_value_);
    given_.write({by_value ? std::numeric_limits<float>::quiet_NaN() : scale}, stream_);
    if (way == Way::pointer) return enqueue({.gradient_scale = scale_.data()});
    const bool first = !graph_;
    if (first) graph_.emplace(stream_, [&] { static_cast<void>(enqueue({})); });
    if (by_value)
      optimizer_->set_inputs(1.0f, scale, stream_);
    else if (first || way == Way::by_turns_in_replays)
      optimizer_->set_inputs(1.0f, scale_.data(), stream_);
    graph_->replay(stream_);
    return optimizer_->last_result(stream_);
  }

  [[nodiscard]] std::vector<Param> parameters() const {
    optimizer_->wait_parameters(stream_);
    return parameters_.read(stream_);
  }
  [[nodiscard]] std::vector<float> state(std::string_view name) const {
    const std::span<float> device = optimizer_->state(name);
    std::vector<float> result(device.size());
    succeed(
        cudaMemcpyAsync(result.data(), device.data(), device.size_bytes(), cudaMemcpyDeviceToHost, stream_));
    stream_.synchronize();
    return result;
  }

 private:
  so::StepTicket enqueue(const so::StepOptions& options) {
    optimizer_->gradient_ready(std::array<so::ParameterId, 2>{so::ParameterId{1}, so::ParameterId{0}},
                               stream_);
    succeed(cudaMemcpyAsync(scale_.data(), given_.data(), sizeof(float), cudaMemcpyDeviceToDevice, stream_));
    return optimizer_->step(options, stream_);
  }

  OwnStream stream_;
  OwnStream communication_;
  OwnMemory<Param> parameters_{static_cast<std::size_t>(extent)};
  OwnMemory<Grad> gradients_{static_cast<std::size_t>(extent)};
  OwnMemory<float> given_{1};
  OwnMemory<float> scale_{1};
  bool by_value_ = false;
  std::optional<Sharded> optimizer_;
  std::optional<CapturedGraph> graph_;
};

constexpr float factors[] = {0.5f, 1.0f / 3.0f, 2.0f, 5.0f, 1.0f / 3.0f, -0.7f, 5.0f, 0.0f, 1e-3f};

template <class T>
std::vector<T> filled(double value) {
  return std::vector<T>(static_cast<std::size_t>(extent), rounded<T>(value));
}

template <class T>
std::vector<T> noisy(std::uint64_t seed, double size) {
  std::vector<T> result;
  for (std::int64_t k = 0; k < extent; ++k)
    result.push_back(rounded<T>(size * (static_cast<double>(noise(seed, k) % 2000001) * 1e-6 - 1.0)));
  return result;
}

/// Everything that a run leaves behind on a rank.
template <class Param>
struct Outcome {
  std::vector<so::StepResult> results;
  std::vector<Param> parameters;
  std::vector<std::vector<float>> states;
};
constexpr std::string_view state_names[] = {"exp_avg", "exp_avg_sq", "master"};

constexpr int steps = 12;
float scale_of(int step) { return factors[static_cast<std::size_t>(step) % std::size(factors)]; }

/// Gradients, in fp16 one that overflows once.
template <class Grad>
std::vector<Grad> gradients_of(int rank, int step) {
  std::vector<Grad> result = noisy<Grad>(noise(7, rank, step), 3.0);
  if (step == 3 && rank == 0) result[500] = rounded<Grad>(std::numeric_limits<double>::infinity());
  return result;
}

template <class Sharded>
typename Sharded::Config adamw_config() {
  typename Sharded::Config config{.groups = {{"default", {.lr = 1e-2, .weight_decay = 0.1}}},
                                  .sharding = {.bucket_bytes = 1024},
                                  .reduction = so::Reduction::ordered,
                                  .max_norm = 1.0f};
  if constexpr (so::dtype_of<typename Sharded::Grad> == so::Dtype::fp16)
    config.loss_scale = so::DynamicLossScale{.initial = 24.0f, .growth_factor = 3.0f, .growth_interval = 4};
  return config;
}

template <class Precision>
std::vector<Outcome<typename Precision::Param>> train_on_host(int world) {
  using Comm = so::Threads<so::Host>;
  using Sharded = Optimizer<so::AdamW, Comm, Precision>;
  std::vector<Outcome<typename Precision::Param>> outcomes(static_cast<std::size_t>(world));
  Comm::run(world, [&](Comm comm) {
    const int rank = comm.rank();
    auto& outcome = outcomes[static_cast<std::size_t>(rank)];
    outcome.parameters = noisy<typename Precision::Param>(1, 1.0);
    std::vector<typename Precision::Grad> gradients(static_cast<std::size_t>(extent));
    Sharded optimizer(make_table(), adamw_config<Sharded>(), std::move(comm),
                      so::FlatBuffers{outcome.parameters.data(), gradients.data()}, {});
    for (int step = 0; step < steps; ++step) {
      const auto fresh = gradients_of<typename Precision::Grad>(rank, step);
      std::copy(fresh.begin(), fresh.end(), gradients.begin());
      outcome.results.push_back(optimizer.step({.gradient_scale = scale_of(step)}, {}).get());
    }
    for (const std::string_view name : state_names) {
      const std::span<float> state = optimizer.state(name);
      outcome.states.emplace_back(state.begin(), state.end());
    }
  });
  return outcomes;
}

template <class Precision>
std::vector<Outcome<typename Precision::Param>> train_on_gpus(int world, Way way) {
  std::vector<Outcome<typename Precision::Param>> outcomes(static_cast<std::size_t>(world));
  const Communicators comms(world);
  on_ranks(world, [&](int rank) {
    using Engine = GpuEngine<so::AdamW, Precision>;
    auto& outcome = outcomes[static_cast<std::size_t>(rank)];
    Engine engine(comms[rank], adamw_config<typename Engine::Sharded>(),
                  noisy<typename Precision::Param>(1, 1.0));
    std::vector<so::StepTicket> tickets;
    for (int step = 0; step < steps; ++step)
      tickets.push_back(engine.step(gradients_of<typename Precision::Grad>(rank, step), scale_of(step), way));
    for (const so::StepTicket& ticket : tickets) outcome.results.push_back(ticket.get());
    outcome.parameters = engine.parameters();
    for (const std::string_view name : state_names) outcome.states.push_back(engine.state(name));
  });
  return outcomes;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

}  // namespace

TEMPLATE_TEST_CASE("A gradient scale in device memory is read as the float it is, in replays, too",
                   "[zero][cuda][B062]", float, so::bf16, so::fp16) {
  // Ranks hold 1, 3, 5, …: the sum is a square, exact in every type and order.
  const int world = GENERATE(1, 2, 4);
  const so::Reduction reduction = GENERATE(so::Reduction::native, so::Reduction::ordered);
  const Way way = GENERATE(Way::value, Way::pointer, Way::in_replays, Way::by_turns_in_replays);
  CAPTURE(world, so::name_of(reduction), static_cast<int>(way));
  require_devices(world);
  using Engine = GpuEngine<so::SGD, so::Mixed<TestType, TestType, float>>;
  std::vector<float> expected{0.0f};  // after each step; what is subtracted is exact
  for (const float factor : factors)
    expected.push_back(expected.back() - factor * static_cast<float>(world * world));
  std::vector<std::vector<std::vector<TestType>>> got(static_cast<std::size_t>(world));
  std::vector<std::vector<float>> masters(static_cast<std::size_t>(world));
  const Communicators comms(world);
  on_ranks(world, [&](int rank) {
    Engine engine(
        comms[rank],
        {.groups = {{"default", {.lr = 1}}}, .sharding = {.bucket_bytes = 1024}, .reduction = reduction},
        filled<TestType>(0));
    for (const float factor : factors) {
      static_cast<void>(engine.step(filled<TestType>(1 + 2 * rank), factor, way));
      got[static_cast<std::size_t>(rank)].push_back(engine.parameters());
    }
    masters[static_cast<std::size_t>(rank)] = engine.state("master");
  });
  const so::ParameterTable table = make_table();
  for (std::size_t rank = 0; rank < got.size(); ++rank) {
    for (std::size_t step = 0; step < std::size(factors); ++step) {
      CAPTURE(rank, step);
      std::vector<TestType> whole = filled<TestType>(0);
      for (const auto& entry : table.entries()) {
        for (std::int64_t k = 0; k < entry.numel; ++k)
          whole[static_cast<std::size_t>(entry.offset + k)] =
              rounded<TestType>(static_cast<double>(expected[step + 1]));
      }
      CHECK(same_bits(got[rank][step], whole));
    }
    CHECK(masters[rank] == std::vector<float>(masters[rank].size(), expected.back()));
    if (sizeof(TestType) == 2 && rank == 0) CHECK(!masters[rank].empty());
  }
}

TEMPLATE_TEST_CASE("Scales in device memory give 16-bit gradients the bits that the host gives them",
                   "[zero][cuda][B062]", so::bf16, so::fp16) {
  const int world = GENERATE(1, 3);
  CAPTURE(world);
  require_devices(world);
  using Precision = so::Mixed<TestType, TestType, float>;
  const auto expected = train_on_host<Precision>(world);
  CHECK(expected[0].results[0].clip_factor < 1.0f);
  CHECK(expected[0].results[3].skipped);
  for (const Way way : {Way::value, Way::pointer, Way::in_replays, Way::by_turns_in_replays}) {
    const auto got = train_on_gpus<Precision>(world, way);
    for (std::size_t rank = 0; rank < got.size(); ++rank) {
      CAPTURE(static_cast<int>(way), rank);
      for (std::size_t step = 0; step < steps; ++step) {
        const so::StepResult& a = expected[rank].results[step];
        const so::StepResult& b = got[rank].results[step];
        CAPTURE(step, a.norm, b.norm);
        CHECK(b.iteration == static_cast<std::int64_t>(step) + 1);
        CHECK(b.skipped == a.skipped);
        CHECK_FALSE(b.inputs_differ);
        CHECK((b.norm == a.norm || (std::isnan(a.norm) && std::isnan(b.norm))));
        CHECK(b.clip_factor == a.clip_factor);
        CHECK(b.loss_scale == a.loss_scale);
      }
      CHECK(same_bits(got[rank].parameters, expected[rank].parameters));
      for (std::size_t k = 0; k < std::size(state_names); ++k) {
        CAPTURE(std::string(state_names[k]));
        CHECK(!expected[rank].states[k].empty());
        CHECK(same_bits(got[rank].states[k], expected[rank].states[k]));
      }
    }
  }
}

TEST_CASE("Scales in device memory that are not finite, or differ between ranks, show in replays, too",
          "[zero][cuda][law6][law7]") {
  const Way way = GENERATE(Way::pointer, Way::in_replays);
  CAPTURE(static_cast<int>(way));
  require_devices(2);
  using Engine = GpuEngine<so::SGD, so::FullPrecision>;
  const float infinity = std::numeric_limits<float>::infinity();
  const std::array<std::array<float, 2>, 5> scales{{{0.3f, 0.3f},
                                                    {infinity, 0.3f},
                                                    {0.3f, std::nextafter(0.3f, 1.0f)},
                                                    {0.0f, std::nanf("")},
                                                    {0.3f, 0.3f}}};
  std::vector<std::string> seen(2);
  const Communicators comms(2);
  on_ranks(2, [&](int rank) {
    Engine engine(comms[rank], {.sharding = {.bucket_bytes = 1024}}, filled<float>(0));
    for (const auto& of_ranks : scales) {
      const so::StepResult result =
          engine.step(filled<float>(1), of_ranks[static_cast<std::size_t>(rank)], way).get();
      seen[static_cast<std::size_t>(rank)] += std::to_string(result.non_finite) +
                                              (result.skipped ? " skipped" : " applied") +
                                              (result.inputs_differ ? " differ; " : "; ");
    }
  });
  for (const std::string& text : seen)
    CHECK(text == "0 applied; 1 skipped differ; 0 applied differ; 1 skipped differ; 0 applied; ");
}
