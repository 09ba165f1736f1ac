// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <random>

namespace shardopt::inline v0::detail {

/// 64 bits that nobody else has: of the system's source, and of the clock where that is weak.
[[nodiscard]] inline std::uint64_t random_bits() {
  std::random_device device;
  const auto time = static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  return (std::uint64_t{device()} << 32 | device()) ^ time;
}

}  // namespace shardopt::inline v0::detail
