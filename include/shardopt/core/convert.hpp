// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/config.hpp>
#include <shardopt/core/dtype.hpp>
#include <shardopt/core/float_bits.hpp>

#include <cstdint>
#include <cstring>

namespace shardopt::inline v0 {

namespace detail {

[[nodiscard]] SHARDOPT_HD inline std::uint16_t bf16_bits(float value) noexcept {
  const std::uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return 0x7fc0;
  return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

[[nodiscard]] SHARDOPT_HD inline std::uint16_t fp16_bits(float value) noexcept {
  const std::uint32_t bits = bits_of(value);
#if defined(__CUDA_ARCH__)
  std::uint16_t half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return (bits & 0x7fffffffU) > 0x7f800000U ? std::uint16_t{0x7e00} : half;  // the device's NaN is another
#else
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) return 0x7e00;
  if (magnitude >= 0x477ff000U) return static_cast<std::uint16_t>(sign | 0x7c00U);  // from 65520 on: infinity
  if (magnitude >= 0x38800000U) {                                                   // from 2^-14 on: normal
    const std::uint32_t rebiased = magnitude - (112U << 23);
    return static_cast<std::uint16_t>(sign | ((rebiased + 0xfffU + ((rebiased >> 13) & 1U)) >> 13));
  }
  if (magnitude <= 0x33000000U)
    return static_cast<std::uint16_t>(sign);             // up to 2^-25: zero (a tie goes to even)
  const std::uint32_t shift = 126U - (magnitude >> 23);  // 14 to 24: units of 2^-24
  const std::uint32_t significand = (magnitude & 0x7fffffU) | 0x800000U;
  const std::uint32_t kept = significand >> shift;
  const std::uint32_t rest = significand & ((1U << shift) - 1U);
  const std::uint32_t half = 1U << (shift - 1U);
  const std::uint32_t up = (rest > half || (rest == half && (kept & 1U) != 0)) ? 1U : 0U;
  return static_cast<std::uint16_t>(sign | (kept + up));
#endif
}

[[nodiscard]] SHARDOPT_HD inline float float_of_fp16(std::uint16_t half) noexcept {
#if defined(__CUDA_ARCH__)
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  const std::uint32_t nan = ((half & 0x8000U) << 16) | 0x7fc00000U | ((half & 0x3ffU) << 13);
  return (half & 0x7fffU) > 0x7c00U ? float_from(nan) : value;  // the device's NaN has lost its payload
#else
  const std::uint32_t sign = (half & 0x8000U) << 16;
  const std::uint32_t exponent = (half >> 10) & 0x1fU;
  std::uint32_t fraction = half & 0x3ffU;
  if (exponent == 31U)
    return float_from(sign | 0x7f800000U | (fraction != 0 ? 0x400000U : 0U) | (fraction << 13));
  if (exponent != 0) return float_from(sign | ((exponent + 112U) << 23) | (fraction << 13));
  if (fraction == 0) return float_from(sign);
  std::uint32_t biased =
      113U;  // a subnormal half is a normal float: shift its leading one to the hidden place
  for (; (fraction & 0x400U) == 0; fraction <<= 1) --biased;
  return float_from(sign | (biased << 23) | ((fraction & 0x3ffU) << 13));
#endif
}

}  // namespace detail

/// The number that an element of a buffer holds. Exact; a NaN keeps its sign and payload.
///
/// `T` is float or any type that stands for fp16 or bf16 by DtypeOf. Integer arithmetic: no mode of the
/// processor counts.
template <class T>
[[nodiscard]] SHARDOPT_HD inline float to_float(T element) noexcept {
  if constexpr (dtype_of<T> == Dtype::fp32) {
    return element;
  } else {
    static_assert(sizeof(T) == sizeof(std::uint16_t));
    std::uint16_t bits;
    memcpy(&bits, &element, sizeof bits);
    if constexpr (dtype_of<T> == Dtype::bf16) {
      return detail::float_from(static_cast<std::uint32_t>(bits) << 16);
    } else {
      static_assert(dtype_of<T> == Dtype::fp16, "only floating-point elements have a value");
      return detail::float_of_fp16(bits);
    }
  }
}

/// The element nearest to a number: ties to even, subnormals kept, too large becomes infinity, every NaN
/// becomes the same one (bf16 0x7fc0, fp16 0x7e00; a float is passed on as it is). The same bits on host and
/// device.
template <class T>
[[nodiscard]] SHARDOPT_HD inline T from_float(float value) noexcept {
  if constexpr (dtype_of<T> == Dtype::fp32) {
    return value;
  } else {
    static_assert(sizeof(T) == sizeof(std::uint16_t));
    static_assert(dtype_of<T> == Dtype::bf16 || dtype_of<T> == Dtype::fp16);
    const std::uint16_t bits =
        dtype_of<T> == Dtype::bf16 ? detail::bf16_bits(value) : detail::fp16_bits(value);
    T element;
    memcpy(&element, &bits, sizeof bits);
    return element;
  }
}

}  // namespace shardopt::inline v0
