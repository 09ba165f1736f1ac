// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bench/workloads.cuh>

#include <shardopt/collectives/nccl.cuh>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <thread>
#include <vector>

namespace bench {

/// What of a training loop runs.
enum class Loop : std::uint8_t {
  compute,     ///< forward and backward, no optimizer
  step,        ///< the optimizer alone
  plain,       ///< backward, then a whole step, and forward when all parameters have come
  overlapped,  ///< each gradient announced behind its layer's backward, each layer's forward when its own
               ///< parameters have come
};

/// A training loop: one GPU a rank, each layer's forward and backward a copy within the device.
struct Training {
  int ranks = 1;
  std::int64_t elements = 0;  ///< of all layers
  int layers = 1;
  std::int64_t bucket_bytes = 0;
  std::int64_t layer_bytes = 0;  ///< of a copy
  int iterations = 1;            ///< after one to warm up
  Loop loop = Loop::overlapped;
  so::Reduction reduction = so::Reduction::automatic;
};

namespace detail {

/// A CUDA event that tells the time.
class TimedEvent {
 public:
  TimedEvent() { so::throw_if_failed(cudaEventCreate(&event_), "cudaEventCreate"); }
  TimedEvent(const TimedEvent&) = delete;
  TimedEvent& operator=(const TimedEvent&) = delete;
  ~TimedEvent() { static_cast<void>(cudaEventDestroy(event_)); }
  void record(cudaStream_t stream) const {
    so::throw_if_failed(cudaEventRecord(event_, stream), "cudaEventRecord");
  }
  /// Waits. @return milliseconds
  [[nodiscard]] float since(const TimedEvent& begin) const {
    float milliseconds = 0;
    so::throw_if_failed(cudaEventSynchronize(event_), "cudaEventSynchronize");
    so::throw_if_failed(cudaEventElapsedTime(&milliseconds, begin.event_, event_), "cudaEventElapsedTime");
    return milliseconds;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

/// @return the ids of the layers, the last of which takes what is left
[[nodiscard]] inline std::vector<so::ParameterId> add_layers(so::ParameterTable& table,
                                                             const Training& training) {
  std::vector<so::ParameterId> layers;
  const std::int64_t numel = training.elements / training.layers;
  for (int layer = 0; layer < training.layers; ++layer) {
    const std::int64_t begin = layer * numel;
    const std::int64_t end = layer + 1 == training.layers ? training.elements : begin + numel;
    layers.push_back(
        table.add({.name = "layer" + std::to_string(layer), .shape = {end - begin}, .offset = begin}));
  }
  return layers;
}

template <class Optimizer>
void iterate(const Training& training, Optimizer& optimizer, const std::vector<so::ParameterId>& layers,
             const Copy& compute, cudaStream_t stream) {
  const bool computes = training.loop != Loop::step;
  const bool overlaps = training.loop == Loop::overlapped;
  if (training.loop == Loop::plain || training.loop == Loop::step) optimizer.wait_parameters(stream);
  for (const so::ParameterId layer : layers) {
    if (overlaps) optimizer.wait_parameters(layer, stream);
    if (computes) compute.launch(stream);
  }
  for (auto layer = layers.rbegin(); layer != layers.rend(); ++layer) {
    if (computes) compute.launch(stream);
    if (overlaps) optimizer.gradient_ready(*layer, stream);
  }
  if (training.loop == Loop::compute) return;
  static_cast<void>(optimizer.step({.gradient_scale = 1.0f / static_cast<float>(training.ranks)}, stream));
}

template <class Rule, class Precision>
float run_rank(const Training& training, const Rule& rule, const ncclUniqueId& id, int rank) {
  using Param = typename Precision::Param;
  using Grad = typename Precision::Grad;
  using Optimizer = so::ZeroOptimizer<Rule, so::FlatSharding, so::Nccl, Precision>;
  so::throw_if_failed(cudaSetDevice(rank), "cudaSetDevice");
  const Stream stream;
  const Stream comm_stream;
  const TimedEvent begin;
  const TimedEvent end;
  const Memory parameters(training.elements * static_cast<std::int64_t>(sizeof(Param)));
  const Memory gradients(training.elements * static_cast<std::int64_t>(sizeof(Grad)));
  const Copy compute(training.layer_bytes);
  so::ParameterTable table;
  const std::vector<so::ParameterId> layers = add_layers(table, training);
  const typename Optimizer::Config config{.groups = {{"default", rule}},
                                          .sharding = {.bucket_bytes = training.bucket_bytes},
                                          .reduction = training.reduction,
                                          .max_norm = 1.0f,
                                          .initial_parameters = so::InitialParameters::trust};
  Optimizer optimizer(table, config, so::Nccl::create(id, rank, training.ranks, comm_stream.get()),
                      so::FlatBuffers{parameters.as<Param>(), gradients.as<Grad>()}, stream.get());
  for (int iteration = 0; iteration <= training.iterations; ++iteration) {
    if (iteration == 1) begin.record(stream.get());
    iterate(training, optimizer, layers, compute, stream.get());
  }
  end.record(stream.get());
  return end.since(begin) / static_cast<float>(training.iterations);
}

}  // namespace detail

/// Runs a training loop by one thread a rank. A rank that fails ends the process, as the others would wait
/// for it.
/// @return milliseconds an iteration on rank 0
template <class Rule, class Precision>
[[nodiscard]] float run_training(const Training& training, const Rule& rule) {
  ncclUniqueId id;
  so::throw_if_failed(ncclGetUniqueId(&id), "ncclGetUniqueId");
  std::vector<float> milliseconds(static_cast<std::size_t>(training.ranks), 0.0f);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < training.ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        milliseconds[static_cast<std::size_t>(rank)] =
            detail::run_rank<Rule, Precision>(training, rule, id, rank);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        std::_Exit(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return milliseconds.front();
}

}  // namespace bench
