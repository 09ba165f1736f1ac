// SPDX-License-Identifier: Apache-2.0
#include <shardopt/cuda.cuh>

#include <support/captured_graph.hpp>
#include <support/cuda_ranks.hpp>
#include <support/numbers.hpp>
#include <support/require_devices.hpp>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_floating_point.hpp>

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

using namespace test;

namespace {

using Optimizer = so::ZeroOptimizer<so::AdamW, so::FlatSharding, so::Nccl, so::FullPrecision>;

constexpr std::size_t steps = 12;
constexpr int micro_batches = 2;
constexpr float start = 0.5f;

/// A layer is one parameter; its backward pass runs on one of two streams. Between layers lie gaps.
struct Layer {
  std::int64_t size;
  std::int64_t offset;
  bool forked;  ///< on the second stream
  bool frozen = false;
};
constexpr Layer layers[] = {
    {1031, 3, false},  {700, 1040, true},       {0, 1740, true},     {257, 1742, false},
    {513, 2000, true}, {90, 2514, false, true}, {2049, 2604, false}, {1, 4653, true},
};
constexpr std::int64_t extent = 4660;

/// The layer's gradient grows by what its parameters and this micro-batch's input give.
__global__ void accumulate(float* gradients, const float* parameters, const float* input,
                           std::int64_t count) {
  for (std::int64_t k = threadIdx.x; k < count; k += blockDim.x)
    gradients[k] = __fadd_rn(gradients[k], __fmaf_rn(0.25f, parameters[k], input[k]));
}

/// What a rank reads in a step: one micro-batch behind the other.
std::vector<float> inputs_of(int rank, std::size_t step) {
  std::vector<float> result(static_cast<std::size_t>(micro_batches * extent));
  for (std::size_t k = 0; k < result.size(); ++k)
    result[k] = 0.001f * (static_cast<float>(noise(rank, step, k) % 2001) - 1000.0f);
  return result;
}

float factor_of(std::size_t step) { return 1.0f / static_cast<float>(1 + step % 5); }

/// Counts the buckets that are reduced while the backward pass still runs.
struct Reductions : so::Observer {
  void bucket_reduced(std::int64_t, std::int64_t) override { ++count; }
  int count = 0;
};

/// One rank's engine, all of whose step can be captured.
class Engine {
 public:
  Engine(int rank, int world, ncclComm_t comm, so::Reduction reduction) : rank_(rank) {
    gradients_.fill(0, stream_);
    parameters_.write(std::vector<float>(extent, start), stream_);
    so::ParameterTable table;
    for (const Layer& layer : layers) {
      ids_.push_back(table.add({.name = std::string("layer ").append(std::to_string(ids_.size())),
                                .shape = {layer.size},
                                .offset = layer.offset,
                                .group = layer.forked ? "forked" : "straight",
                                .frozen = layer.frozen}));
    }
    const Optimizer::Config config{
        .groups = {{"straight", {.lr = 1e-2, .weight_decay = 0.1}}, {"forked", {.lr = 3e-2, .beta1 = 0.8}}},
        .sharding = {.bucket_bytes = 2048},
        .reduction = reduction,
        .max_norm = 5.0f,
        .observer = &reductions_};
    const so::MemoryPlan plan = Optimizer::plan(table, config, {.rank = rank, .world = world});
    device_.emplace(static_cast<std::size_t>(plan.device_bytes));
    pinned_.emplace(static_cast<std::size_t>(plan.pinned_bytes), true);
    optimizer_.emplace(table, config, so::Nccl::borrow(comm, communication_),
                       so::FlatBuffers{parameters_.data(), gradients_.data()},
                       so::Arena{device_->data(), pinned_->data()}, stream_);
    succeed(cudaEventCreateWithFlags(&forked_, cudaEventDisableTiming));
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine() { static_cast<void>(cudaEventDestroy(forked_)); }

  /// @param replay  the graph of a step instead of the step
  so::StepResult step(std::size_t step, bool replay) {
    const float scale = 1.0f / static_cast<float>(micro_batches * optimizer_->world());
    inputs_.write(inputs_of(rank_, step), stream_);
    if (!replay) return enqueue({.lr_factor = factor_of(step), .gradient_scale = scale}).get();
    if (!graph_) capture();
    optimizer_->set_inputs(factor_of(step), scale, stream_);
    graph_->replay(stream_);
    return optimizer_->last_result(stream_).get();
  }

  void capture() {
    optimizer_->wait_parameters(stream_);  // a capture cannot hold a wait for what was gathered outside it
    graph_.emplace(stream_, [&] { static_cast<void>(enqueue({})); });
  }

  [[nodiscard]] std::vector<float> parameters() const { return parameters(stream_); }
  [[nodiscard]] std::vector<float> parameters(cudaStream_t stream) const {
    optimizer_->wait_parameters(stream);
    return parameters_.read(stream);
  }

  /// Whether what the optimizer enqueued still runs when it is gone.
  [[nodiscard]] bool runs_after_optimizer() {
    graph_.reset();
    optimizer_.reset();
    return cudaStreamQuery(communication_) != cudaSuccess;
  }

  /// How many buckets the last step that was not replayed reduced before its backward pass had ended.
  [[nodiscard]] int reduced_early() const noexcept { return reduced_early_; }

 private:
  /// Backward passes, the last layer first, and the step behind them. Only the optimizer brings the second
  /// stream back.
  so::StepTicket enqueue(const so::StepOptions& options) {
    succeed(cudaEventRecord(forked_, stream_));
    succeed(cudaStreamWaitEvent(second_, forked_, 0));
    const int before = reductions_.count;
    for (int batch = 0; batch < micro_batches; ++batch) {
      for (std::size_t k = ids_.size(); k-- > 0;) backward(k, batch);
    }
    reduced_early_ = reductions_.count - before;
    const so::StepTicket ticket = optimizer_->step(options, stream_);
    optimizer_->zero_gradients(stream_);
    return ticket;
  }

  void backward(std::size_t index, int batch) {
    const Layer& layer = layers[index];
    const cudaStream_t stream = layer.forked ? second_ : stream_;
    if (batch == 0) optimizer_->wait_parameters(ids_[index], stream);
    if (layer.size > 0) {
      accumulate<<<1, 256, 0, stream>>>(gradients_.data() + layer.offset, parameters_.data() + layer.offset,
                                        inputs_.data() + batch * extent + layer.offset, layer.size);
      succeed(cudaGetLastError());
    }
    if (batch == micro_batches - 1) optimizer_->gradient_ready(ids_[index], stream);
  }

  int rank_;
  OwnStream stream_;
  OwnStream second_;
  OwnStream communication_;
  OwnMemory<float> parameters_{extent};
  OwnMemory<float> gradients_{extent};
  OwnMemory<float> inputs_{micro_batches * extent};
  cudaEvent_t forked_ = nullptr;
  Reductions reductions_;
  int reduced_early_ = 0;
  std::vector<so::ParameterId> ids_;
  std::optional<OwnMemory<std::byte>>
      device_;  // the engine's own, so that nothing is freed with the optimizer
  std::optional<OwnMemory<std::byte>> pinned_;
  std::optional<Optimizer> optimizer_;
  std::optional<CapturedGraph> graph_;
};

/// The first element in which two buffers differ, or nothing.
std::string differing(const std::vector<float>& expected, const std::vector<float>& got) {
  if (expected.size() != got.size()) return "another size";
  for (std::size_t k = 0; k < expected.size(); ++k) {
    if (!same(expected[k], got[k]))
      return "element " + std::to_string(k) + ": " + text_of(expected[k]) + " and " + text_of(got[k]);
  }
  return "";
}

struct History {
  std::vector<so::StepResult> results;
  std::vector<std::vector<float>> parameters;  ///< after each step; empty where nobody waited for them
  int reduced_early = 0;
};

/// @param replays  of four steps; between another step and a replay nothing waits for parameters
std::vector<History> train(int world, so::Reduction reduction, std::size_t replays) {
  const auto replayed = [&](std::size_t step) { return (step + 1) % 4 < replays; };
  std::vector<History> histories(static_cast<std::size_t>(world));
  const Communicators comms(world);
  on_ranks(world, [&](int rank) {
    History& history = histories[static_cast<std::size_t>(rank)];
    Engine engine(rank, world, comms[rank], reduction);
    for (std::size_t step = 0; step < steps; ++step) {
      history.results.push_back(engine.step(step, replayed(step)));
      const bool read = replayed(step) || !replayed(step + 1);
      history.parameters.push_back(read ? engine.parameters() : std::vector<float>{});
    }
    history.reduced_early = engine.reduced_early();
  });
  return histories;
}

/// The norm of the first gradient, by a plain loop.
double first_norm(int world) {
  double squares = 0;
  for (const Layer& layer : layers) {
    for (std::int64_t k = layer.offset; k < layer.offset + layer.size && !layer.frozen; ++k) {
      double sum = 0;
      for (int rank = 0; rank < world; ++rank) {
        const std::vector<float> inputs = inputs_of(rank, 0);
        for (int batch = 0; batch < micro_batches; ++batch)
          sum += 0.25 * start + inputs[static_cast<std::size_t>(batch * extent + k)];
      }
      squares += sum * sum;
    }
  }
  return std::sqrt(squares) / (micro_batches * world);
}

}  // namespace

TEST_CASE("A backward pass on two streams and its step in one graph equal uncaptured ones, bit for bit",
          "[zero][cuda][B075][B078]") {
  const int world = GENERATE(2, 3);
  const so::Reduction reduction = GENERATE(so::Reduction::native, so::Reduction::ordered);
  const std::size_t replays = GENERATE(as<std::size_t>{}, 4, 2);  // all steps, or half of them
  CAPTURE(world, so::name_of(reduction), replays);
  require_devices(world);
  const auto uncaptured = train(world, reduction, 0);
  const auto replayed = train(world, reduction, replays);
  for (std::size_t rank = 0; rank < uncaptured.size(); ++rank) {
    CAPTURE(rank);
    const History& expected = uncaptured[rank];
    const History& got = replayed[rank];
    CHECK(got.reduced_early >= 3);
    CHECK_THAT(got.results.front().norm, Catch::Matchers::WithinRel(first_norm(world), 1e-6));
    for (std::size_t step = 0; step < steps; ++step) {
      CAPTURE(step);
      CHECK(got.results[step].iteration == static_cast<std::int64_t>(step) + 1);
      CHECK_FALSE(got.results[step].skipped);
      CHECK_FALSE(got.results[step].inputs_differ);
      CHECK(got.results[step].norm == expected.results[step].norm);
      CHECK(got.results[step].clip_factor == expected.results[step].clip_factor);
      if (!got.parameters[step].empty())
        CHECK(differing(expected.parameters[step], got.parameters[step]) == "");
    }
    CHECK(differing(got.parameters.back(), got.parameters.front()) != "");
    CHECK(got.results.front().clip_factor < 1.0f);
  }
}

TEST_CASE("A capture changes nothing about waiting for the step before it", "[zero][cuda][B077][B078]") {
  require_devices(2);
  const bool goes = GENERATE(false, true);
  CAPTURE(goes);
  const auto expected = train(2, so::Reduction::ordered, 0);
  std::vector<float> got[2];
  bool left_running[2] = {};
  const Communicators comms(2);
  on_ranks(2, [&](int rank) {
    Engine engine(rank, 2, comms[rank], so::Reduction::ordered);
    const OwnStream other;
    engine.step(0, false);
    engine.capture();
    if (goes)
      left_running[rank] = engine.runs_after_optimizer();
    else
      got[rank] = engine.parameters(other);
  });
  for (int rank = 0; rank < 2; ++rank) {
    CAPTURE(rank);
    CHECK_FALSE(left_running[rank]);
    if (!goes) CHECK(differing(expected[static_cast<std::size_t>(rank)].parameters.front(), got[rank]) == "");
  }
}
