// SPDX-License-Identifier: Apache-2.0
// Two ranks train three steps while, somewhere, one call fails (inject.py sees to that). Ends with 0 if what
// was promised for a failure held, and says what happened.

#include <shardopt/cuda.cuh>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <thread>
#include <vector>

namespace so = shardopt;
using namespace std::chrono_literals;

namespace {

constexpr int world = 2;
constexpr std::int64_t elements = 5000;

/// A call of the engine's own has failed: nothing to say about the library.
struct EngineFailure {};

void require(cudaError_t status) {
  if (status != cudaSuccess) throw EngineFailure{};
}

struct Engine {
  Engine() = default;
  void open(int rank) {
    require(cudaSetDevice(rank));
    require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    require(cudaStreamCreateWithFlags(&comm_stream, cudaStreamNonBlocking));
    require(cudaMalloc(&parameters, elements * sizeof(so::bf16)));
    require(cudaMalloc(&gradients, elements * sizeof(float)));
    require(cudaMemsetAsync(parameters, 0, elements * sizeof(so::bf16), stream));
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine() {
    static_cast<void>(cudaFree(parameters));
    static_cast<void>(cudaFree(gradients));
    if (stream != nullptr) static_cast<void>(cudaStreamDestroy(stream));
    if (comm_stream != nullptr) static_cast<void>(cudaStreamDestroy(comm_stream));
  }

  void fill_gradients(int step) const {
    const std::vector<float> values(elements, 0.01f * static_cast<float>(step));
    require(
        cudaMemcpyAsync(gradients, values.data(), elements * sizeof(float), cudaMemcpyHostToDevice, stream));
  }
  [[nodiscard]] std::vector<so::bf16> download() const {
    std::vector<so::bf16> values(elements);
    require(cudaMemcpyAsync(values.data(), parameters, elements * sizeof(so::bf16), cudaMemcpyDeviceToHost,
                            stream));
    require(cudaStreamSynchronize(stream));
    return values;
  }

  cudaStream_t stream = nullptr;
  cudaStream_t comm_stream = nullptr;
  so::bf16* parameters = nullptr;
  float* gradients = nullptr;
};

using Optimizer = so::ZeroOptimizer<so::AdamW, so::FlatSharding, so::Nccl, so::Mixed<so::bf16, float, float>>;

[[noreturn]] void broken_promise(int rank, const std::string& what, const std::string& text) {
  std::fprintf(stderr, "rank %d: %s: %s\n", rank, what.c_str(), text.c_str());
  std::_Exit(1);
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// After an exception in a step: the cause stays, and what was not updated is as it was.
void examine(Optimizer& optimizer, const Engine& engine, const std::vector<so::bf16>& before, int rank,
             int step, const std::string& text) {
  if (!contains(text, "rank " + std::to_string(rank)) ||
      !contains(text, "iteration " + std::to_string(step))) {
    broken_promise(rank, "the message lacks rank or iteration " + std::to_string(step), text);
  }
  std::string again = "nothing";
  try {
    static_cast<void>(optimizer.step({}, engine.stream));
  } catch (const so::Error& error) {
    again = error.what();
  }
  if (!contains(again, text.substr(0, text.find(';'))))
    broken_promise(rank, "a later call reports another cause", again);
  if (contains(text, "update of bucket") || contains(text, "gather of bucket")) return;
  if (optimizer.counters(engine.stream).iteration != step - 1)
    broken_promise(rank, "counters have moved", text);
  if (engine.download() != before) broken_promise(rank, "parameters have changed", text);
}

std::string train(const ncclUniqueId& id, int rank) {
  Engine engine;
  engine.open(rank);
  so::ParameterTable table;
  table.add({.name = "a", .shape = {3000}, .offset = 3});
  table.add({.name = "b", .shape = {1500}, .offset = 3100});
  const Optimizer::Config config{
      .sharding = {.bucket_bytes = 8192}, .reduction = so::Reduction::ordered, .max_norm = 1.0f};
  Optimizer optimizer(table, config, so::Nccl::create(id, rank, world, engine.comm_stream, {.deadline = 2s}),
                      so::FlatBuffers{engine.parameters, engine.gradients}, engine.stream);
  for (int step = 1; step <= 3; ++step) {
    const std::vector<so::bf16> before = engine.download();
    engine.fill_gradients(step);
    try {
      optimizer.gradient_ready(so::ParameterId{1}, engine.stream);
      const so::StepTicket ticket = optimizer.step({}, engine.stream);
      if (ticket.get().iteration != step) broken_promise(rank, "iteration", std::to_string(step));
      optimizer.wait_parameters(engine.stream);
    } catch (const so::Error& error) {
      const std::string text = error.what();
      if (contains(text, "the optimizer is broken")) examine(optimizer, engine, before, rank, step, text);
      return text;
    }
  }
  return "trained";
}

}  // namespace

int main() {
  ncclUniqueId id;
  if (ncclGetUniqueId(&id) != ncclSuccess) return 0;
  std::vector<std::string> ends(world);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      std::string& end = ends[static_cast<std::size_t>(rank)];
      try {
        end = train(id, rank);
      } catch (const so::CudaError& error) {
        end = std::string("CudaError: ") + error.what();
      } catch (const so::NcclError& error) {
        end = std::string("NcclError: ") + error.what();
      } catch (const so::CollectiveError& error) {
        end = std::string("CollectiveError: ") + error.what();
      } catch (const EngineFailure&) {
        end = "engine";
      } catch (const std::exception& error) {
        broken_promise(rank, "an exception of the wrong kind", error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < world; ++rank)
    std::printf("rank %d: %s\n", rank, ends[static_cast<std::size_t>(rank)].c_str());
  return 0;
}
