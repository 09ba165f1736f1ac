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
  using Device = DeviceType;
  using Stream = typename Device::Stream;
  static constexpr std::string_view name = "solo";

  /// @param stream  where the library works beside the caller's streams
  explicit Solo(Stream stream = {}) : device_(Device::of(stream)), stream_(stream) {}

  [[nodiscard]] int rank() const noexcept { return 0; }
  [[nodiscard]] int world() const noexcept { return 1; }
  [[nodiscard]] Stream stream() const noexcept { return stream_; }
  [[nodiscard]] const Device& device() const noexcept { return device_; }

  [[nodiscard]] static bool supports(Reduction, Dtype) noexcept { return true; }
  [[nodiscard]] static Reduction automatic_reduction(Dtype) noexcept { return Reduction::ordered; }
  [[nodiscard]] static std::int64_t workspace_bytes(Reduction, BlockLayout, Dtype, int /*rank*/) noexcept {
    return 0;
  }

  void reduce_scatter(void*, BlockLayout, Dtype, Reduction, void*) noexcept {}
  void all_gather(void*, BlockLayout, Dtype) noexcept {}
  void all_reduce(std::int64_t*, std::int64_t) noexcept {}
  void broadcast(void*, std::int64_t, int) noexcept {}
  void exchange(std::span<const std::byte> mine, std::span<std::byte> all, void*) {
    std::copy(mine.begin(), mine.end(), all.begin());
  }

 private:
  Device device_;
  Stream stream_;
};

}  // namespace shardopt::inline v0
