// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/config.hpp>

#include <bit>
#include <cstdint>

namespace shardopt::inline v0::detail {

// Floats as their bits and back, on host and device. What a compiler believes of a float (that it is "never
// NaN") does not reach tests of its bits: hence the empty asm statements.

[[nodiscard]] SHARDOPT_HD_INLINE std::uint32_t bits_of(float value) noexcept {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  auto bits = std::bit_cast<std::uint32_t>(value);
  asm("" : "+r"(bits));
  return bits;
#endif
}

[[nodiscard]] SHARDOPT_HD_INLINE std::uint64_t bits_of(double value) noexcept {
#if defined(__CUDA_ARCH__)
  return static_cast<std::uint64_t>(__double_as_longlong(value));
#else
  auto bits = std::bit_cast<std::uint64_t>(value);
  asm("" : "+r"(bits));
  return bits;
#endif
}

[[nodiscard]] SHARDOPT_HD_INLINE float float_from(std::uint32_t bits) noexcept {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}

[[nodiscard]] SHARDOPT_HD_INLINE double double_from(std::uint64_t bits) noexcept {
#if defined(__CUDA_ARCH__)
  return __longlong_as_double(static_cast<long long>(bits));
#else
  return std::bit_cast<double>(bits);
#endif
}

}  // namespace shardopt::inline v0::detail
