// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/cuda.cuh>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

// What is measured, without a word of how: set-up, launch, bytes moved. Knows no benchmark library.

namespace bench {

namespace so = shardopt;

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
  [[nodiscard]] std::int64_t bytes_moved() const noexcept { return 2 * bytes_; }

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

  /// Gradient read, parameter written (and read where it is its own master), master and states read and
  /// written.
  [[nodiscard]] std::int64_t bytes_moved() const noexcept {
    const std::int64_t param = sizeof(Param);
    const std::int64_t grad = sizeof(Grad);
    const auto states = static_cast<std::int64_t>(stateful_ ? so::state_count<Rule> : 0);
    return elements_ * (grad + (Precision::has_master ? param + 8 : 2 * param) + 8 * states);
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
  [[nodiscard]] std::int64_t bytes_moved() const noexcept {
    return elements_ * static_cast<std::int64_t>(sizeof(Grad));
  }

 private:
  std::int64_t elements_;
  Memory gradients_;
  std::int64_t tile_count_ = 0;
  Memory tiles_;
  Memory words_;
  so::Cuda device_;
};

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
  [[nodiscard]] std::int64_t bytes_moved() const noexcept {
    const std::int64_t grad = sizeof(Grad);
    const std::int64_t param = sizeof(Param);
    return elements_ * (2 * grad + (Precision::has_master ? param + 8 : 2 * param) +
                        8 * static_cast<std::int64_t>(so::state_count<Rule>));
  }

 private:
  static so::ParameterTable table(std::int64_t elements) {
    so::ParameterTable table;
    table.add({.name = "all", .shape = {elements}, .offset = 0});
    return table;
  }

  std::int64_t elements_;
  Memory parameters_;
  Memory gradients_;
  Optimizer optimizer_;
};

}  // namespace bench
