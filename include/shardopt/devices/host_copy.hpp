// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <future>
#include <thread>

namespace shardopt::inline v0::detail {

/// Bytes that are worth a thread of their own: some milliseconds.
inline constexpr std::int64_t bytes_worth_a_copying_thread = std::int64_t{32} << 20;

/// Copies bytes that do not overlap; many of them with several threads, as one core does not reach what the
/// memory can do.
inline void copy_on_host(void* to, const void* from, std::int64_t bytes) noexcept {
  if (bytes <= 0) return;
  constexpr std::int64_t most = 4;                                 // enough for the memory of one socket
  const std::int64_t cores = std::thread::hardware_concurrency();  // 0: not known
  const std::int64_t threads =
      (std::max)(std::int64_t{1}, (std::min)({most, cores, bytes / bytes_worth_a_copying_thread}));
  const auto copy = [&](std::int64_t begin, std::int64_t end) {
    std::memcpy(static_cast<std::byte*>(to) + begin, static_cast<const std::byte*>(from) + begin,
                static_cast<std::size_t>(end - begin));
  };
  const std::int64_t part = bytes / threads;
  std::int64_t end = bytes;                        // what is from here on is another thread's
  std::array<std::future<void>, most - 1> others;  // their destructors wait
  try {
    for (std::int64_t k = 1; k < threads; ++k) {
      others[static_cast<std::size_t>(k - 1)] = std::async(std::launch::async, copy, end - part, end);
      end -= part;
    }
  } catch (const std::exception&) {
    // No thread can start: what was not handed over is copied here.
  }
  copy(0, end);
}

}  // namespace shardopt::inline v0::detail
