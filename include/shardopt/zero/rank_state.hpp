// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/collective.hpp>
#include <shardopt/devices/update.hpp>
#include <shardopt/precision/precision_policy.hpp>
#include <shardopt/rules/rule.hpp>
#include <shardopt/zero/bucket_buffers.hpp>
#include <shardopt/zero/buffers.hpp>
#include <shardopt/zero/config.hpp>
#include <shardopt/zero/owned_memory.hpp>
#include <shardopt/zero/setup_digest.hpp>
#include <shardopt/zero/step_control.hpp>
#include <shardopt/zero/step_memory.hpp>
#include <shardopt/zero/warnings.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace shardopt::inline v0::detail {

/// What a rank keeps on its device: counters, hyper-parameters, tiles, states and masters, scratch.
template <OptimizerRule Rule, PrecisionPolicy Precision, class Device>
class RankState {
  using Param = typename Precision::Param;
  using Grad = typename Precision::Grad;
  using Constants = typename Rule::Constants;
  using Stream = typename Device::Stream;
  static_assert(alignof(Rule) <= static_cast<std::size_t>(arena_alignment) &&
                    alignof(Constants) <= static_cast<std::size_t>(arena_alignment),
                "shardopt: a rule and its Constants may be aligned to 256 bytes at most, as memory is");

 public:
  /// @param arena  the engine's, or null: allocated  @param adopted  the engine's state buffers, or null
  /// @throws std::invalid_argument for memory of the engine's that does not fit; what the device throws
  RankState(const Device& device, const PlannedMemory& planned, const Arena* arena,
            const StateBuffers* adopted, Observer* observer)
      : plan_(planned.plan), at_(planned.offsets) {
    if (adopted != nullptr) require_fitting(*adopted);
    const Arena given = arena != nullptr ? *arena : adopted != nullptr ? adopted->scratch : Arena{};
    memory_.emplace(device, plan_, given, arena != nullptr, observer);
    for (const auto& buffer : plan_.buffers) {
      buffers_.push_back(adopted != nullptr ? find(*adopted, buffer.name)
                                            : memory_->template at<float>(buffer.offset_bytes));
    }
  }

  [[nodiscard]] StepState* control() const noexcept { return memory_->template at<StepState>(at_.state); }
  [[nodiscard]] Rule* rules() const noexcept { return memory_->template at<Rule>(at_.rules); }
  [[nodiscard]] Constants* constants() const noexcept {
    return memory_->template at<Constants>(at_.constants);
  }
  [[nodiscard]] void* scratch() const noexcept { return memory_->template at<std::byte>(at_.scratch); }
  [[nodiscard]] void* workspace() const noexcept { return memory_->template at<std::byte>(at_.workspace); }
  [[nodiscard]] void* pinned() const noexcept { return memory_->pinned(); }
  [[nodiscard]] void* transfer(std::int64_t bytes) { return memory_->transfer(bytes); }
  template <class T>
  [[nodiscard]] T* staging() const noexcept {
    return memory_->template at<T>(at_.staging);
  }
  [[nodiscard]] const std::vector<BucketTiles>& tiles() const noexcept { return tiles_; }

  /// A state buffer by name, or "master"; empty if it is not kept.
  [[nodiscard]] std::span<float> buffer(std::string_view name) const noexcept {
    for (std::size_t k = 0; k < buffers_.size(); ++k) {
      if (plan_.buffers[k].name == name)
        return {buffers_[k], static_cast<std::size_t>(plan_.owned_parameters)};
    }
    return {};
  }

  /// Builds the map of tiles, and writes it with hyper-parameters and counters to the device. Tells the
  /// observer what is probably not meant.
  template <class Config>
  void upload(const ShardLayout& layout, const EngineBuffers<Param, Grad>& buffers, const Config& config,
              const Device& device, Stream stream) {
    tell_warnings(layout, config, dtype_of<Grad>);
    std::vector<Tile> map;
    Tile* base = memory_->template at<Tile>(at_.map);
    tiles_ = build_tiles(layout, buffers, base, map);
    device.upload(base, map.data(), static_cast<std::int64_t>(map.size() * sizeof(Tile)), stream);
    std::vector<Rule> rules_by_group;
    for (const auto& group : config.groups) rules_by_group.push_back(group.rule);
    device.upload(rules(), rules_by_group.data(),
                  static_cast<std::int64_t>(rules_by_group.size() * sizeof(Rule)), stream);
    device.fill_zero(control(), sizeof(StepState), stream);
    device.invoke(
        InitializeStep{control(), digest_of_rules(config.groups),
                       config.loss_scale.value_or(DynamicLossScale{}), config.loss_scale.has_value()},
        stream);
  }

  /// Zeroes the states and copies the masters from the parameters. @pre upload() came before
  void initialize_buffers(const Device& device, Stream stream) const {
    for (std::size_t k = 0; k < buffers_.size(); ++k) {
      if (plan_.buffers[k].name != "master") device.fill_zero(buffers_[k], plan_.buffers[k].bytes, stream);
    }
    initialize_masters(device, stream);
  }

  /// master = parameter, where masters are kept.
  void initialize_masters(const Device& device, Stream stream) const {
    if constexpr (Precision::has_master) {
      for (const BucketTiles& bucket : tiles_) {
        device.template initialize_masters<Param>(bucket.updated.tiles, bucket.updated.count, master(),
                                                  stream);
      }
    }
  }

  /// parameter = master, rounded, for what this rank updates of a bucket; nothing where no masters are kept.
  void round_masters(std::size_t bucket, const Device& device, Stream stream) const {
    if constexpr (Precision::has_master) {
      const TileRun& tiles = tiles_[bucket].updated;
      device.template round_masters<Param>(tiles.tiles, tiles.count, master(), stream);
    }
  }

  /// @param stateful  whether the rule's states are kept
  [[nodiscard]] UpdateArguments<Rule, Precision> update_arguments(TileRun tiles,
                                                                  bool stateful) const noexcept {
    UpdateArguments<Rule, Precision> arguments{.tiles = tiles.tiles,
                                               .tile_count = tiles.count,
                                               .states = {},
                                               .master = master(),
                                               .constants = constants(),
                                               .verdict = &control()->verdict,
                                               .stateful = stateful};
    if (stateful) {
      for (std::size_t k = 0; k != state_count<Rule>; ++k) arguments.states[k] = buffers_[k];
    }
    return arguments;
  }

  /// Leaves the memory to the process: a device may use it for ever.
  void abandon() noexcept { memory_->abandon(); }

 private:
  [[nodiscard]] float* master() const noexcept { return Precision::has_master ? buffers_.back() : nullptr; }

  [[nodiscard]] static float* find(const StateBuffers& adopted, const std::string& name) {
    for (const auto& [given, pointer] : adopted.buffers) {
      if (given == name) return pointer;
    }
    throw std::invalid_argument("shardopt: StateBuffers lacks " + in_quotes(name));
  }

  void require_fitting(const StateBuffers& adopted) const {
    for (std::size_t k = 0; k < adopted.buffers.size(); ++k) {
      const auto& [name, pointer] = adopted.buffers[k];
      for (std::size_t other = 0; other < k; ++other) {
        if (adopted.buffers[other].first == name)
          throw std::invalid_argument("shardopt: StateBuffers names " + in_quotes(name) + " twice");
      }
      bool known = false;
      for (const auto& buffer : plan_.buffers) known = known || buffer.name == name;
      if (!known)
        throw std::invalid_argument("shardopt: StateBuffers names " + in_quotes(name) +
                                    ", which this optimizer does not keep");
      if (pointer == nullptr && plan_.owned_parameters > 0) {
        throw std::invalid_argument("shardopt: StateBuffers holds a null pointer for " + in_quotes(name));
      }
      if (reinterpret_cast<std::uintptr_t>(pointer) % alignof(float) != 0) {
        throw std::invalid_argument("shardopt: StateBuffers: the address of " + in_quotes(name) +
                                    " is not a multiple of 4 bytes");
      }
    }
    for (const auto& buffer : plan_.buffers) static_cast<void>(find(adopted, buffer.name));
  }

  MemoryPlan plan_;
  ArenaOffsets at_;
  std::optional<OwnedMemory<Device>> memory_;
  std::vector<float*> buffers_;
  std::vector<BucketTiles> tiles_;
};

}  // namespace shardopt::inline v0::detail
