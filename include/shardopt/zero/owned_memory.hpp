// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/zero/buffers.hpp>
#include <shardopt/zero/memory_plan.hpp>
#include <shardopt/zero/observer.hpp>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace shardopt::inline v0::detail {

/// The one piece of device memory and the one of page-locked memory that an optimizer works in: the engine's
/// arena, or its own.
template <class Device>
class OwnedMemory {
 public:
  /// @param given  whether the arena must be used; otherwise parts of it that are null are allocated
  /// @throws std::invalid_argument for an arena that is null or not aligned
  OwnedMemory(const Device& device, const MemoryPlan& plan, const Arena& arena, bool given,
              Observer* observer)
      : OwnedMemory(device, arena) {  // complete from here on: what follows may throw and leaks nothing
    if (given && (arena.device == nullptr || arena.pinned == nullptr)) {
      throw std::invalid_argument(
          "shardopt: Arena holds a null pointer; it needs plan.device_bytes and plan.pinned_bytes");
    }
    require_aligned(arena.device, "device");
    require_aligned(arena.pinned, "pinned");
    if (arena.device != nullptr && arena.pinned != nullptr) return;
    if (observer != nullptr) observer->before_allocation(plan);
    if (arena.device == nullptr) {
      device_memory_ = device_.allocate(plan.device_bytes);
      owns_device_ = true;
    }
    if (arena.pinned == nullptr) {
      pinned_memory_ = device_.allocate_pinned(plan.pinned_bytes);
      owns_pinned_ = true;
    }
    if (observer != nullptr) observer->after_allocation(plan);
  }

  OwnedMemory(const OwnedMemory&) = delete;
  OwnedMemory& operator=(const OwnedMemory&) = delete;

  ~OwnedMemory() {
    if (owns_device_) device_.deallocate(device_memory_);
    if (owns_pinned_) device_.deallocate_pinned(pinned_memory_);
    if (transfer_memory_ != nullptr) device_.deallocate_pinned(transfer_memory_);
  }

  /// Leaves the memory to the process: a device may use it for ever.
  void abandon() noexcept {
    owns_device_ = false;
    owns_pinned_ = false;
    transfer_memory_ = nullptr;
  }

  /// Page-locked memory to copy states through, beyond the plan: allocated at the first call and kept,
  /// because CUDA may wait for other ranks' GPUs before it releases any. @param bytes  the same in every call
  [[nodiscard]] void* transfer(std::int64_t bytes) {
    if (transfer_memory_ == nullptr) transfer_memory_ = device_.allocate_pinned(bytes);
    return transfer_memory_;
  }

  /// A part of the device memory.
  template <class T>
  [[nodiscard]] T* at(std::int64_t offset_bytes) const noexcept {
    return reinterpret_cast<T*>(static_cast<std::byte*>(device_memory_) + offset_bytes);
  }
  [[nodiscard]] void* pinned() const noexcept { return pinned_memory_; }

 private:
  OwnedMemory(const Device& device, const Arena& arena)
      : device_(device), device_memory_(arena.device), pinned_memory_(arena.pinned) {}

  static void require_aligned(const void* address, const char* which) {
    if (reinterpret_cast<std::uintptr_t>(address) % static_cast<std::uintptr_t>(arena_alignment) == 0) return;
    throw std::invalid_argument(std::string("shardopt: Arena.") + which + " must be aligned to " +
                                std::to_string(arena_alignment) + " bytes");
  }

  Device device_;
  void* device_memory_;
  void* pinned_memory_;
  void* transfer_memory_ = nullptr;
  bool owns_device_ = false;
  bool owns_pinned_ = false;
};

}  // namespace shardopt::inline v0::detail
