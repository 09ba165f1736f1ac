// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace shardopt::inline v0::checkpoint::detail {

/// Reads device memory through two page-locked buffers: one is filled while the other is used.
template <class Device>
class DeviceReader {
 public:
  /// Bytes of page-locked memory for the time of the reading.
  static constexpr std::int64_t pinned_bytes = std::int64_t{8} << 20;

  explicit DeviceReader(const Device& device)
      : device_(device), memory_(static_cast<std::byte*>(device.allocate_pinned(pinned_bytes))) {
    for (auto& chunk : chunks_) {
      try {
        chunk.filled = device.make_event();
      } catch (...) {
        device_.deallocate_pinned(memory_);
        throw;
      }
    }
    chunks_[0].memory = memory_;
    chunks_[1].memory = memory_ + chunk_bytes;
  }
  DeviceReader(const DeviceReader&) = delete;
  DeviceReader& operator=(const DeviceReader&) = delete;
  ~DeviceReader() {
    for (auto& chunk : chunks_) {
      if (chunk.bytes > 0) device_.finish(chunk.filled);  // a copy into it may still run
    }
    device_.deallocate_pinned(memory_);
  }

  /// Hands the bytes of all runs to `sink(std::span<const std::byte>)`, in order. Waits for what `stream`
  /// holds. @param runs  elements with `data` and `range`
  template <class Runs, class Sink>
  void read(const Runs& runs, typename Device::Stream stream, const Sink& sink) {
    std::size_t filling = 0;
    for (const auto& run : runs) {
      const auto* from = reinterpret_cast<const std::byte*>(run.data);
      std::int64_t left = run.range.size() * static_cast<std::int64_t>(sizeof(*run.data));
      while (left > 0) {
        Chunk& chunk = chunks_[filling];
        const std::int64_t bytes = (std::min)(left, chunk_bytes - chunk.bytes);
        device_.copy(chunk.memory + chunk.bytes, from, bytes, stream);
        chunk.bytes += bytes;
        from += bytes;
        left -= bytes;
        if (chunk.bytes < chunk_bytes) continue;
        device_.record(chunk.filled, stream);
        filling = 1 - filling;
        hand_over(chunks_[filling], sink);
      }
    }
    device_.record(chunks_[filling].filled, stream);
    hand_over(chunks_[1 - filling], sink);
    hand_over(chunks_[filling], sink);
  }

 private:
  static constexpr std::int64_t chunk_bytes = pinned_bytes / 2;

  struct Chunk {
    std::byte* memory = nullptr;
    std::int64_t bytes = 0;
    typename Device::Event filled = {};
  };

  template <class Sink>
  void hand_over(Chunk& chunk, const Sink& sink) {
    if (chunk.bytes == 0) return;
    device_.synchronize(chunk.filled);
    const auto bytes = static_cast<std::size_t>(std::exchange(chunk.bytes, 0));
    sink(std::span<const std::byte>(chunk.memory, bytes));
  }

  Device device_;
  std::byte* memory_;
  std::array<Chunk, 2> chunks_ = {};
};

}  // namespace shardopt::inline v0::checkpoint::detail
