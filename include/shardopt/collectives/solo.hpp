// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/collective.hpp>
#include <shardopt/core/error.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace shardopt::inline v0 {

/// A world of one rank: the same path as with many, with nothing to send.
template <class DeviceType>
class Solo {
 public:
  /// Where buffers live and kernels run.
  using Device = DeviceType;
  /// The device's stream type.
  using Stream = typename Device::Stream;
  /// As it stands in messages.
  static constexpr std::string_view name = "solo";

  /// @param stream  where the library works beside the caller's streams
  explicit Solo(Stream stream = {}) : device_(Device::of(stream)), stream_(stream) {}

  /// This rank: 0 .. world - 1.
  [[nodiscard]] int rank() const noexcept { return 0; }
  /// Number of ranks.
  [[nodiscard]] int world() const noexcept { return 1; }
  /// The stream on which every call is enqueued.
  [[nodiscard]] Stream stream() const noexcept { return stream_; }
  /// The device of this rank.
  [[nodiscard]] const Device& device() const noexcept { return device_; }

  /// Whether gradients of that type can be reduced so.
  [[nodiscard]] static bool supports(Reduction, Dtype) noexcept { return true; }
  /// What Reduction::automatic stands for.
  [[nodiscard]] static Reduction automatic_reduction(Dtype) noexcept { return Reduction::ordered; }
  /// Bytes that reduce_scatter needs beside its buffer.
  [[nodiscard]] static std::int64_t workspace_bytes(Reduction, BlockLayout, Dtype, int /*rank*/) noexcept {
    return 0;
  }

  /// Block `rank()` of `base` becomes the sum over the ranks. @see Collective
  void reduce_scatter(void*, BlockLayout, Dtype, Reduction, void*) noexcept {}
  /// Block r of `base` becomes rank r's on every rank. @see Collective
  void all_gather(void*, BlockLayout, Dtype) noexcept {}
  /// Sums 64-bit integers over the ranks, modulo 2^64. @see Collective
  void all_reduce(std::int64_t*, std::int64_t) noexcept {}
  /// Rank `root`'s bytes replace the others'. @see Collective
  void broadcast(void*, std::int64_t, int) noexcept {}
  /// Host bytes of every rank to every rank; waits. @see Collective
  void exchange(std::span<const std::byte> mine, std::span<std::byte> all, void*) {
    std::copy(mine.begin(), mine.end(), all.begin());
  }

 private:
  Device device_;
  Stream stream_;
};

}  // namespace shardopt::inline v0
