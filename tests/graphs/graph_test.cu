// SPDX-License-Identifier: Apache-2.0
#include <shardopt/cuda.cuh>

#include <support/require_devices.hpp>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <string>
#include <thread>
#include <vector>

namespace so = shardopt;

namespace {

constexpr int steps = 55;
constexpr int replays = 50;
constexpr std::int64_t elements = 6000;  // of both buffers; parameters lie in it with gaps

using Optimizer = so::ZeroOptimizer<so::AdamW, so::FlatSharding, so::Nccl, so::Mixed<float, float, float>>;

so::ParameterTable make_table() {
  so::ParameterTable table;
  table.add({.name = "a", .shape = {1000, 3}, .offset = 5, .group = "decay"});
  table.add({.name = "b", .shape = {77}, .offset = 3011, .group = "plain"});
  table.add({.name = "c", .shape = {2049}, .offset = 3500, .group = "decay"});
  return table;
}

float factor_of(int step) { return 1.0f / static_cast<float>(1 + step % 7); }

std::vector<float> gradients_of(int rank, int step) {
  std::vector<float> result(elements);
  for (std::int64_t i = 0; i < elements; ++i) {
    result[static_cast<std::size_t>(i)] =
        std::sin(static_cast<float>(i * 3 + rank * 17 + step * 29)) * (step % 5 == 0 ? 0.001f : 0.1f);
  }
  const bool bad = step == 11 || step == 30;
  if (bad && rank == 1) result[4000] = std::numeric_limits<float>::quiet_NaN();
  return result;
}

/// One rank's engine: buffers and streams, freed at the end.
struct Engine {
  explicit Engine(int rank) {
    so::throw_if_failed(cudaSetDevice(rank), "cudaSetDevice");
    so::throw_if_failed(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    so::throw_if_failed(cudaStreamCreateWithFlags(&comm_stream, cudaStreamNonBlocking), "cudaStreamCreate");
    so::throw_if_failed(cudaMalloc(&parameters, elements * sizeof(float)), "cudaMalloc");
    so::throw_if_failed(cudaMalloc(&gradients, elements * sizeof(float)), "cudaMalloc");
    upload(parameters, std::vector<float>(elements, 0.5f));
  }
  ~Engine() {
    cudaFree(parameters);
    cudaFree(gradients);
    cudaStreamDestroy(stream);
    cudaStreamDestroy(comm_stream);
  }
  void upload(float* to, const std::vector<float>& from) const {
    so::throw_if_failed(
        cudaMemcpyAsync(to, from.data(), elements * sizeof(float), cudaMemcpyHostToDevice, stream),
        "cudaMemcpyAsync");
  }
  std::vector<float> download() const {
    std::vector<float> result(elements);
    so::throw_if_failed(
        cudaMemcpyAsync(result.data(), parameters, elements * sizeof(float), cudaMemcpyDeviceToHost, stream),
        "cudaMemcpyAsync");
    so::throw_if_failed(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    return result;
  }

  cudaStream_t stream = nullptr;
  cudaStream_t comm_stream = nullptr;
  float* parameters = nullptr;
  float* gradients = nullptr;
};

struct Outcome {
  std::vector<float> parameters;
  std::vector<so::StepResult> results;
};

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// @param captured  how many of the first steps replay one graph
Outcome train(const ncclUniqueId& id, int rank, int world, int captured, so::Reduction reduction) {
  Engine engine(rank);
  Outcome outcome;
  const so::ParameterTable table = make_table();
  const Optimizer::Config config{
      .groups = {{"decay", {.lr = 1e-2, .weight_decay = 0.1}}, {"plain", {.lr = 1e-2}}},
      .sharding = {.bucket_bytes = 8192},
      .reduction = reduction,
      .max_norm = 1.0f};
  Optimizer optimizer(table, config, so::Nccl::create(id, rank, world, engine.comm_stream),
                      so::FlatBuffers{engine.parameters, engine.gradients}, engine.stream);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  if (captured > 0) {
    so::throw_if_failed(cudaStreamBeginCapture(engine.stream, cudaStreamCaptureModeThreadLocal),
                        "cudaStreamBeginCapture");
    const so::StepTicket ticket = optimizer.step({}, engine.stream);
    so::throw_if_failed(cudaStreamEndCapture(engine.stream, &graph), "cudaStreamEndCapture");
    so::throw_if_failed(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
    CHECK_THROWS_AS(ticket.get(), so::Error);
  }
  for (int step = 0; step < steps; ++step) {
    optimizer.wait_parameters(engine.stream);
    engine.upload(engine.gradients, gradients_of(rank, step));
    const float scale = 1.0f / static_cast<float>(world);
    if (step < captured) {
      optimizer.set_inputs(factor_of(step), scale, engine.stream);
      so::throw_if_failed(cudaGraphLaunch(executable, engine.stream), "cudaGraphLaunch");
      outcome.results.push_back(optimizer.last_result(engine.stream).get());
    } else {
      outcome.results.push_back(
          optimizer.step({.lr_factor = factor_of(step), .gradient_scale = scale}, engine.stream).get());
    }
  }
  optimizer.wait_parameters(engine.stream);
  outcome.parameters = engine.download();
  if (executable != nullptr) cudaGraphExecDestroy(executable);
  if (graph != nullptr) cudaGraphDestroy(graph);
  return outcome;
}

std::vector<Outcome> train_all(int world, int captured, so::Reduction reduction) {
  ncclUniqueId id;
  so::throw_if_failed(ncclGetUniqueId(&id), "ncclGetUniqueId");
  std::vector<Outcome> outcomes(static_cast<std::size_t>(world));
  std::vector<std::string> failures(static_cast<std::size_t>(world));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        outcomes[static_cast<std::size_t>(rank)] = train(id, rank, world, captured, reduction);
      } catch (const std::exception& error) {
        failures[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& failure : failures) {
    INFO(failure);
    REQUIRE(failure.empty());
  }
  return outcomes;
}

}  // namespace

TEST_CASE("fifty replays of a captured step and five uncaptured ones equal fifty-five uncaptured ones",
          "[zero][cuda][B078]") {
  const int world = GENERATE(1, 2);
  const so::Reduction reduction = GENERATE(so::Reduction::native, so::Reduction::ordered);
  CAPTURE(world, so::name_of(reduction));
  test::require_devices(world);
  const auto plain = train_all(world, 0, reduction);
  const auto replayed = train_all(world, replays, reduction);
  for (std::size_t rank = 0; rank < plain.size(); ++rank) {
    CAPTURE(rank);
    CHECK(same(plain[rank].parameters, replayed[rank].parameters));
    for (std::size_t step = 0; step < steps; ++step) {
      CAPTURE(step);
      const so::StepResult& a = plain[rank].results[step];
      const so::StepResult& b = replayed[rank].results[step];
      REQUIRE(a.iteration == static_cast<std::int64_t>(step) + 1);
      REQUIRE(b.iteration == a.iteration);
      REQUIRE(b.updates == a.updates);
      REQUIRE(b.skipped == a.skipped);
      REQUIRE(a.skipped == (world > 1 && (step == 11 || step == 30)));
      if (!a.skipped) REQUIRE(b.norm == a.norm);
      REQUIRE(b.clip_factor == a.clip_factor);
    }
    CHECK(plain[rank].results[1].clip_factor < 1.0f);
  }
}
