// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/cuda.cuh>

#include <atomic>
#include <barrier>
#include <cstdint>
#include <exception>
#include <string>
#include <thread>
#include <utility>
#include <vector>

// What is measured, without a word of how: set-up, launch, bytes moved. Knows no benchmark library.

namespace bench {

namespace so = shardopt;

/// What a launch reads and writes, at least.
struct Traffic {
  std::int64_t read;
  std::int64_t written;
  [[nodiscard]] constexpr std::int64_t total() const noexcept { return read + written; }
};

/// Bytes of an update of some elements: gradient read, parameter written (and read where it is its own),
/// master and states read and written.
template <class Rule, class Precision>
[[nodiscard]] constexpr Traffic update_traffic(std::int64_t elements, bool stateful = true) noexcept {
  const std::int64_t param = sizeof(typename Precision::Param);
  const std::int64_t grad = sizeof(typename Precision::Grad);
  const std::int64_t master = Precision::has_master ? 4 : 0;
  const std::int64_t states = stateful ? 4 * static_cast<std::int64_t>(so::state_count<Rule>) : 0;
  return {elements * (grad + (Precision::has_master ? master : param) + states),
          elements * (param + master + states)};
}

/// Device memory that frees itself; holds zeros.
class Memory {
 public:
  explicit Memory(std::int64_t bytes) {
    so::throw_if_failed(cudaMalloc(&address_, static_cast<std::size_t>(bytes)), "cudaMalloc");
    so::throw_if_failed(cudaMemset(address_, 0, static_cast<std::size_t>(bytes)), "cudaMemset");
    so::throw_if_failed(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // whatever stream comes next
  }
  Memory(Memory&& other) noexcept : address_(std::exchange(other.address_, nullptr)) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { static_cast<void>(cudaFree(address_)); }

  /// Copies from the host, and waits.
  void upload(const void* from, std::size_t bytes) {
    so::throw_if_failed(cudaMemcpy(address_, from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
    so::throw_if_failed(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }

  template <class T>
  [[nodiscard]] T* as() const noexcept {
    return static_cast<T*>(address_);
  }

 private:
  void* address_ = nullptr;
};

/// The limit: a copy within the device.
class Copy {
 public:
  explicit Copy(std::int64_t bytes) : bytes_(bytes), from_(bytes), to_(bytes) {}
  void launch(cudaStream_t stream) const {
    so::throw_if_failed(cudaMemcpyAsync(to_.as<void>(), from_.as<void>(), static_cast<std::size_t>(bytes_),
                                        cudaMemcpyDeviceToDevice, stream),
                        "cudaMemcpyAsync");
  }
  [[nodiscard]] Traffic bytes() const noexcept { return {bytes_, bytes_}; }

 private:
  std::int64_t bytes_;
  Memory from_;
  Memory to_;
};

/// The tiles of one parameter that fills both buffers.
template <class Param, class Grad>
[[nodiscard]] Memory upload_tiles(Param* parameters, Grad* gradients, std::int64_t elements,
                                  std::int64_t& count) {
  std::vector<so::Tile> tiles;
  so::detail::append_tiles(so::detail::Segment{.flat = {0, elements}}, parameters, gradients, 0, tiles);
  count = static_cast<std::int64_t>(tiles.size());
  Memory memory(count * static_cast<std::int64_t>(sizeof(so::Tile)));
  memory.upload(tiles.data(), tiles.size() * sizeof(so::Tile));
  return memory;
}

/// The update kernel alone.
template <class Rule, class Precision>
class Update {
  using Param = typename Precision::Param;
  using Grad = typename Precision::Grad;
  using Constants = typename Rule::Constants;

 public:
  Update(std::int64_t elements, const Rule& rule)
      : elements_(elements),
        stateful_(!so::stateless(rule)),
        parameters_(elements * static_cast<std::int64_t>(sizeof(Param))),
        gradients_(elements * static_cast<std::int64_t>(sizeof(Grad))),
        master_(Precision::has_master ? elements * 4 : 4),
        tiles_(upload_tiles(parameters_.template as<Param>(), gradients_.template as<Grad>(), elements,
                            tile_count_)),
        constants_(sizeof(Constants)),
        verdict_(sizeof(so::StepVerdict)),
        device_(so::Cuda::of(nullptr)) {
    for (std::size_t k = 0; k < so::state_count<Rule>; ++k)
      states_.emplace_back(stateful_ ? elements * 4 : 4);
    const Constants constants = rule.constants({.lr_factor = 1.0f, .update = 1});
    const so::StepVerdict verdict{.gradient_factor = 1.0f, .go = 1};
    constants_.upload(&constants, sizeof constants);
    verdict_.upload(&verdict, sizeof verdict);
  }

  void launch(cudaStream_t stream) const {
    so::UpdateArguments<Rule, Precision> arguments{.tiles = tiles_.template as<so::Tile>(),
                                                   .tile_count = tile_count_,
                                                   .states = {},
                                                   .master = master_.template as<float>(),
                                                   .constants = constants_.template as<Constants>(),
                                                   .verdict = verdict_.template as<so::StepVerdict>(),
                                                   .stateful = stateful_};
    for (std::size_t k = 0; k < states_.size(); ++k) arguments.states[k] = states_[k].template as<float>();
    device_.update(arguments, stream);
  }

  [[nodiscard]] Traffic bytes() const noexcept {
    return update_traffic<Rule, Precision>(elements_, stateful_);
  }

 private:
  std::int64_t elements_;
  bool stateful_;
  Memory parameters_;
  Memory gradients_;
  Memory master_;
  std::int64_t tile_count_ = 0;
  Memory tiles_;
  Memory constants_;
  Memory verdict_;
  so::Cuda device_;
  std::vector<Memory> states_;
};

/// The norm kernel alone.
template <class Grad>
class Norm {
 public:
  explicit Norm(std::int64_t elements)
      : elements_(elements),
        gradients_(elements * static_cast<std::int64_t>(sizeof(Grad))),
        tiles_(upload_tiles(gradients_.as<Grad>(), gradients_.as<Grad>(), elements, tile_count_)),
        words_((so::exact_sum::Squares::limbs + 1) * static_cast<std::int64_t>(sizeof(std::int64_t))),
        device_(so::Cuda::of(nullptr)) {}

  void launch(cudaStream_t stream) const {
    auto* words = words_.as<std::int64_t>();
    device_.add_squares<Grad>(tiles_.as<so::Tile>(), tile_count_, words,
                              words + so::exact_sum::Squares::limbs, stream);
  }
  [[nodiscard]] Traffic bytes() const noexcept {
    return {elements_ * static_cast<std::int64_t>(sizeof(Grad)), 0};
  }

 private:
  std::int64_t elements_;
  Memory gradients_;
  std::int64_t tile_count_ = 0;
  Memory tiles_;
  Memory words_;
  so::Cuda device_;
};

/// One parameter.
[[nodiscard]] inline so::ParameterTable table(std::int64_t elements) {
  so::ParameterTable table;
  table.add({.name = "all", .shape = {elements}, .offset = 0});
  return table;
}

/// A whole step at one rank: norm, decision, update.
template <class Rule, class Precision>
class Step {
  using Param = typename Precision::Param;
  using Grad = typename Precision::Grad;
  using Optimizer = so::ZeroOptimizer<Rule, so::FlatSharding, so::Solo<so::Cuda>, Precision>;

 public:
  /// @param stream  the engine's, for the set-up
  Step(std::int64_t elements, const Rule& rule, cudaStream_t stream, cudaStream_t comm_stream)
      : elements_(elements),
        parameters_(elements * static_cast<std::int64_t>(sizeof(Param))),
        gradients_(elements * static_cast<std::int64_t>(sizeof(Grad))),
        optimizer_(table(elements), {.groups = {{"default", rule}}, .max_norm = 1.0f},
                   so::Solo<so::Cuda>(comm_stream),
                   so::FlatBuffers{parameters_.template as<Param>(), gradients_.template as<Grad>()},
                   stream) {}

  void launch(cudaStream_t stream) {
    static_cast<void>(optimizer_.step({}, stream));
    optimizer_.wait_parameters(stream);
  }
  /// The update's, and the gradient once more for the norm.
  [[nodiscard]] Traffic bytes() const noexcept {
    Traffic traffic = update_traffic<Rule, Precision>(elements_);
    traffic.read += elements_ * static_cast<std::int64_t>(sizeof(Grad));
    return traffic;
  }

 private:
  std::int64_t elements_;
  Memory parameters_;
  Memory gradients_;
  Optimizer optimizer_;
};

/// A CUDA stream that destroys itself.
class Stream {
 public:
  Stream() {
    so::throw_if_failed(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
                        "cudaStreamCreateWithFlags");
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { static_cast<void>(cudaStreamDestroy(stream_)); }
  [[nodiscard]] cudaStream_t get() const noexcept { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// A whole step of several ranks, threads of this process on the current device: each with all parameters and
/// gradients of its own, as on as many devices.
template <class Rule, class Precision>
class RanksStep {
  using Param = typename Precision::Param;
  using Grad = typename Precision::Grad;
  using Optimizer = so::ZeroOptimizer<Rule, so::FlatSharding, so::Threads<so::Cuda>, Precision>;

 public:
  RanksStep(int world, std::int64_t elements, const Rule& rule)
      : world_(world),
        elements_(elements),
        device_(so::Cuda::of(nullptr)),
        begin_(device_.make_event()),
        meeting_(world + 1) {
    for (int rank = 0; rank < world; ++rank) ends_.push_back(device_.make_event());
    team_ = std::thread([this, rule] { run_team(rule); });
    meeting_.arrive_and_wait();  // set up
    if (failure_) join_and_rethrow();
  }
  RanksStep(const RanksStep&) = delete;
  RanksStep& operator=(const RanksStep&) = delete;
  ~RanksStep() {
    if (!team_.joinable()) return;
    finished_ = true;
    meeting_.arrive_and_wait();
    team_.join();
  }

  /// Waits for the ranks' threads, not for the device. @throws what a rank threw
  void launch(cudaStream_t stream) {
    device_.record(begin_, stream);
    meeting_.arrive_and_wait();  // begin
    meeting_.arrive_and_wait();  // all is enqueued
    if (failure_) join_and_rethrow();
    for (const so::Cuda::Event& end : ends_) device_.wait(stream, end);
  }

  /// Of all ranks: a reduction that reads each gradient and writes each sum once, norm and update of all
  /// shards, and a copy of each shard to each other rank.
  [[nodiscard]] Traffic bytes() const noexcept {
    const std::int64_t gradients = elements_ * static_cast<std::int64_t>(sizeof(Grad));
    const std::int64_t gathered = (world_ - 1) * elements_ * static_cast<std::int64_t>(sizeof(Param));
    const Traffic update = update_traffic<Rule, Precision>(elements_);
    return {(world_ + 1) * gradients + update.read + gathered, gradients + update.written + gathered};
  }

 private:
  void run_team(const Rule& rule) {
    try {
      so::throw_if_failed(cudaSetDevice(device_.ordinal()), "cudaSetDevice");
      so::Threads<so::Cuda>::run(world_,
                                 [&](so::Threads<so::Cuda> comm) { run_rank(std::move(comm), rule); });
    } catch (...) {
      // A rank that failed has left the meeting; the exception reaches launch() through failure_.
    }
  }

  void run_rank(so::Threads<so::Cuda> comm, const Rule& rule) try {
    const auto rank = static_cast<std::size_t>(comm.rank());
    const Stream stream;
    const Memory parameters(elements_ * static_cast<std::int64_t>(sizeof(Param)));
    const Memory gradients(elements_ * static_cast<std::int64_t>(sizeof(Grad)));
    Optimizer optimizer(table(elements_), {.groups = {{"default", rule}}, .max_norm = 1.0f}, std::move(comm),
                        so::FlatBuffers{parameters.template as<Param>(), gradients.template as<Grad>()},
                        stream.get());
    meeting_.arrive_and_wait();
    while (true) {
      meeting_.arrive_and_wait();
      if (finished_) return;
      device_.wait(stream.get(), begin_);
      static_cast<void>(optimizer.step({}, stream.get()));
      optimizer.wait_parameters(stream.get());
      device_.record(ends_[rank], stream.get());
      meeting_.arrive_and_wait();
    }
  } catch (...) {
    if (!failed_.exchange(true)) failure_ = std::current_exception();
    meeting_.arrive_and_drop();
    throw;
  }

  [[noreturn]] void join_and_rethrow() {
    finished_ = true;
    meeting_.arrive_and_drop();
    team_.join();
    std::rethrow_exception(failure_);
  }

  int world_;
  std::int64_t elements_;
  so::Cuda device_;
  so::Cuda::Event begin_;
  std::vector<so::Cuda::Event> ends_;
  std::barrier<> meeting_;  ///< of the ranks and who launches
  std::atomic<bool> failed_ = false;
  std::exception_ptr failure_;  ///< written before the writer arrives
  bool finished_ = false;       ///< written before the team goes on
  std::thread team_;
};

}  // namespace bench
