// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace shardopt::inline v0::checkpoint::detail {

/// Reads device memory through the two halves of page-locked memory: one is filled while the other is used.
template <class Device>
class DeviceReader {
 public:
  /// @param memory  page-locked, and not given back before every rank is done: CUDA may then wait for other
  /// ranks' GPUs
  DeviceReader(const Device& device, std::span<std::byte> memory)
      : device_(device), chunk_bytes_(static_cast<std::int64_t>(memory.size() / 2)) {
    for (std::size_t k = 0; k < chunks_.size(); ++k) {
      chunks_[k].memory = memory.data() + k * static_cast<std::size_t>(chunk_bytes_);
      chunks_[k].filled = device.make_event();
    }
  }
  DeviceReader(const DeviceReader&) = delete;
  DeviceReader& operator=(const DeviceReader&) = delete;
  ~DeviceReader() {
    for (auto& chunk : chunks_) {
      if (chunk.bytes > 0) device_.finish(chunk.filled);  // a copy into it may still run
    }
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
        const std::int64_t bytes = (std::min)(left, chunk_bytes_ - chunk.bytes);
        device_.copy(chunk.memory + chunk.bytes, from, bytes, stream);
        chunk.bytes += bytes;
        from += bytes;
        left -= bytes;
        if (chunk.bytes < chunk_bytes_) continue;
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
  std::int64_t chunk_bytes_;
  std::array<Chunk, 2> chunks_ = {};
};

}  // namespace shardopt::inline v0::checkpoint::detail
