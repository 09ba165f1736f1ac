// SPDX-License-Identifier: Apache-2.0
#include <shardopt/cuda.cuh>

#include <support/captured_graph.hpp>
#include <support/cuda_ranks.hpp>
#include <support/numbers.hpp>
#include <support/require_devices.hpp>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

using namespace test;

namespace {

using Optimizer = so::ZeroOptimizer<so::SGD, so::FlatSharding, so::Nccl, so::FullPrecision>;
using Scalars = std::array<float, so::most_scalars>;

constexpr int steps = 9;
constexpr std::int64_t elements = 1000;  // two buckets

/// Any finite float: of both signs, from the smallest subnormal to the largest.
float any_float(std::uint64_t word) {
  const float value = from_bits<float>(static_cast<std::uint32_t>(word));
  return std::isfinite(value) ? value : 0x1p127f;
}

/// What a whole is that the ranks of any world hold equal parts of.
float whole_of(int step) { return static_cast<float>(noise(5, step) % 16000001) * 0x1p-20f - 7.0f; }

/// A rank's scalars in a step: numbers of any size, an equal part of a whole, one that is sometimes no
/// number, and one that is given in every other step of those that are not captured.
Scalars scalars_of(int world, int rank, int step) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const bool last = rank == world - 1;
  float wide = any_float(noise(3, rank, step));
  if (step % 3 == 1 && last && rank > 0)
    wide = -any_float(noise(3, 0, step));  // what is left is tiny or nothing
  float doubtful = 0x1p-149f;
  if (step == 2 && last) doubtful = std::numeric_limits<float>::quiet_NaN();
  if (step == 4) doubtful = last ? -infinity : infinity;
  if (step == 6 && rank == 0) doubtful = infinity;
  const float fourth = step == 6 ? infinity : step == 5 ? -0.0f : -0.1f;
  return {wide, whole_of(step) / static_cast<float>(world), doubtful, fourth};
}

/// What the sums must be. Zeros have no sign.
std::array<double, so::most_scalars> sums_of(int world, int step, bool fourth) {
  std::array<double, so::most_scalars> sums{};
  for (std::size_t k = 0; k < sums.size(); ++k) {
    ExactSum sum;
    bool finite = true;
    for (int rank = 0; rank < world; ++rank) {
      const float scalar = scalars_of(world, rank, step)[k];
      finite = finite && std::isfinite(scalar);
      if (finite) sum.add(static_cast<double>(scalar));
    }
    sums[k] = finite ? sum.value() + 0.0 : std::numeric_limits<double>::quiet_NaN();
  }
  if (!fourth) sums[3] = 0.0;
  return sums;
}

std::uint64_t bits_of_double(double value) { return __builtin_bit_cast(std::uint64_t, value); }

/// One rank's engine. Its scalars are written anew in each step, when all gradients have been announced.
class Engine {
 public:
  explicit Engine(ncclComm_t comm) {
    parameters_.fill(0, stream_);
    gradients_.fill(0, stream_);
    so::ParameterTable table;
    table.add({.name = "a", .shape = {elements}, .offset = 0});
    optimizer_.emplace(table, Optimizer::Config{.sharding = {.bucket_bytes = 2048}},
                       so::Nccl::borrow(comm, communication_),
                       so::FlatBuffers{parameters_.data(), gradients_.data()}, stream_);
  }

  void give(const Scalars& scalars) { given_.write({scalars.begin(), scalars.end()}, stream_); }

  so::StepTicket step(bool halves, bool fourth) {
    optimizer_->gradient_ready(so::ParameterId{0}, stream_);
    succeed(
        cudaMemcpyAsync(scalars_.data(), given_.data(), given_.bytes(), cudaMemcpyDeviceToDevice, stream_));
    so::StepOptions options;
    for (std::size_t k = 0; k < scalars_.size(); ++k) options.scalars[k] = scalars_.data() + k;
    if (!fourth) options.scalars[3] = nullptr;
    if (!halves) return optimizer_->step(options, stream_);
    static_cast<void>(optimizer_->reduce(options, stream_));
    return optimizer_->apply({}, stream_);
  }

  so::StepTicket replay(bool halves) {
    if (!graph_) graph_.emplace(stream_, [&] { static_cast<void>(step(halves, true)); });
    graph_->replay(stream_);
    return optimizer_->last_result(stream_);
  }

 private:
  OwnStream stream_;
  OwnStream communication_;
  OwnMemory<float> parameters_{elements};
  OwnMemory<float> gradients_{elements};
  OwnMemory<float> given_{so::most_scalars};
  OwnMemory<float> scalars_{so::most_scalars};
  std::optional<Optimizer> optimizer_;
  std::optional<CapturedGraph> graph_;
};

}  // namespace

TEST_CASE("Sums of the engine's scalars are exact on the device, in steps and in replays, in any world",
          "[zero][cuda]") {
  const int world = GENERATE(1, 2, 4);
  const bool captured = GENERATE(false, true);
  const bool halves = GENERATE(false, true);
  CAPTURE(world, captured, halves);
  require_devices(world);
  const auto fourth = [&](int step) { return captured || step % 2 == 0; };
  std::vector<std::vector<so::StepResult>> results(static_cast<std::size_t>(world));
  const Communicators comms(world);
  on_ranks(world, [&](int rank) {
    Engine engine(comms[rank]);
    std::vector<so::StepTicket> tickets;  // asked at the end: no step waits for the one before it
    for (int step = 0; step < steps; ++step) {
      engine.give(scalars_of(world, rank, step));
      tickets.push_back(captured ? engine.replay(halves) : engine.step(halves, fourth(step)));
    }
    for (const so::StepTicket& ticket : tickets)
      results[static_cast<std::size_t>(rank)].push_back(ticket.get());
  });
  for (const std::vector<so::StepResult>& of_rank : results) {
    for (int step = 0; step < steps; ++step) {
      const so::StepResult& result = of_rank[static_cast<std::size_t>(step)];
      const auto expected = sums_of(world, step, fourth(step));
      CHECK(result.iteration == step + 1);
      CHECK_FALSE(result.skipped);
      CHECK_FALSE(result.inputs_differ);
      for (std::size_t k = 0; k < expected.size(); ++k) {
        CAPTURE(step, k, expected[k], result.scalars[k]);
        CHECK(std::isnan(result.scalars[k]) == std::isnan(expected[k]));
        if (!std::isnan(expected[k])) CHECK(bits_of_double(result.scalars[k]) == bits_of_double(expected[k]));
      }
      CHECK(result.scalars[1] == static_cast<double>(whole_of(step)));
    }
  }
}
