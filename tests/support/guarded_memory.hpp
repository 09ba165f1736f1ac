// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <support/numbers.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace test {

inline constexpr std::byte poison{0xa5};

/// Device memory between two guards full of poison; so is the inside until something is written.
template <class Memory>
class GuardedMemory {
 public:
  using Stream = typename Memory::Stream;
  static constexpr std::int64_t guard = 256;

  /// @param shift  bytes between an aligned address and the inside
  GuardedMemory(std::int64_t bytes, Stream stream, std::int64_t shift = 0, bool pinned = false)
      : bytes_(bytes), shift_(shift), stream_(stream), pinned_(pinned) {
    memory_ = pinned ? Memory::allocate_pinned(total()) : Memory::allocate(total());
    const std::vector<std::byte> image(static_cast<std::size_t>(total()), poison);
    Memory::upload(memory_, image.data(), total(), stream_);
  }
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;
  ~GuardedMemory() { pinned_ ? Memory::deallocate_pinned(memory_) : Memory::deallocate(memory_); }

  [[nodiscard]] std::byte* data() const { return memory_ + guard + shift_; }
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }

  [[nodiscard]] bool guards_intact() const {
    std::vector<std::byte> image(static_cast<std::size_t>(total()));
    Memory::download(image.data(), memory_, total(), stream_);
    const auto inside = image.begin() + static_cast<std::ptrdiff_t>(guard + shift_);
    const auto clean = [](std::byte b) { return b == poison; };
    return std::all_of(image.begin(), inside, clean) &&
           std::all_of(inside + static_cast<std::ptrdiff_t>(bytes_), image.end(), clean);
  }

 private:
  [[nodiscard]] std::int64_t total() const { return bytes_ + 2 * guard + shift_; }

  std::int64_t bytes_;
  std::int64_t shift_;
  Stream stream_;
  bool pinned_;
  std::byte* memory_;
};

/// A flat buffer of the engine's in guarded memory, with a copy of what the host last saw.
template <class T, class Memory>
class EngineBuffer {
 public:
  using Stream = typename Memory::Stream;

  EngineBuffer(std::int64_t elements, Stream stream, std::int64_t misaligned = 0)
      : memory_(elements * bytes_of_element, stream, misaligned * bytes_of_element),
        stream_(stream),
        host(static_cast<std::size_t>(elements)) {
    download();
  }

  [[nodiscard]] T* data() const { return reinterpret_cast<T*>(memory_.data()); }
  [[nodiscard]] bool guards_intact() const { return memory_.guards_intact(); }
  void upload() { Memory::upload(data(), host.data(), memory_.bytes(), stream_); }
  void download() { Memory::download(host.data(), data(), memory_.bytes(), stream_); }

 private:
  static constexpr std::int64_t bytes_of_element = sizeof(T);
  GuardedMemory<Memory> memory_;
  Stream stream_;

 public:
  std::vector<T> host;
};

}  // namespace test
