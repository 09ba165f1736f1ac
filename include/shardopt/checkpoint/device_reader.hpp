// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace shardopt::inline v0::checkpoint::detail {

/// Bytes of host memory that read_device() takes for its time.
inline constexpr std::int64_t read_device_bytes = std::int64_t{4} << 20;

/// Hands the bytes of all runs in device memory to `sink(std::span<const std::byte>)`, in order. Waits for
/// what `stream` holds.
///
/// Through pageable memory: cudaFreeHost waits for every device of the process, also for one whose rank has
/// begun a collective that waits for this rank.
/// @param runs  elements with `data` and `range`
template <class Device, class Runs, class Sink>
void read_device(const Device& device, const Runs& runs, typename Device::Stream stream, const Sink& sink) {
  const auto chunk = std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(read_device_bytes));
  for (const auto& run : runs) {
    const auto* from = reinterpret_cast<const std::byte*>(run.data);
    const std::int64_t all = run.range.size() * static_cast<std::int64_t>(sizeof(*run.data));
    for (std::int64_t done = 0; done < all;) {
      const std::int64_t bytes = (std::min)(all - done, read_device_bytes);
      device.download(chunk.get(), from + done, bytes, stream);
      sink(std::span<const std::byte>(chunk.get(), static_cast<std::size_t>(bytes)));
      done += bytes;
    }
  }
}

}  // namespace shardopt::inline v0::checkpoint::detail
