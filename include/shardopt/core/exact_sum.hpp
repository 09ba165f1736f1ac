// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/config.hpp>

#include <cstdint>

namespace shardopt::inline v0 {

/// Exact sums of doubles that are sums of squares of floats: integers in 32-bit limbs of 64-bit words
/// (carry-save), so that their order cannot matter: words are added by atomics and by one all-reduce of
/// int64.
///
/// Limb k weighs 2^(32 k - 352). A grain's sum of squares is a multiple of 2^-298 (the smallest square of a
/// float) below 2^264; 22 limbs leave 88 bits for the number of grains, and each word takes 2^31 additions
/// without overflow.
namespace exact_sum {

/// Words of a sum.
inline constexpr int limbs = 22;
/// Binary exponent of a sum's lowest bit.
inline constexpr int lowest_exponent = -352;

/// The three limbs that one double touches: words[first + k] += parts[k].
struct Addend {
  /// Word that the lowest part is added to.
  int first;
  /// 32 bits for each of three consecutive words.
  std::uint32_t parts[3];
};

/// Splits a value. @pre value is finite, >= 0, and a multiple of 2^-298 below 2^264
[[nodiscard]] SHARDOPT_HD constexpr Addend split(double value) noexcept {
  const auto bits = __builtin_bit_cast(std::uint64_t, value);
  const int exponent = static_cast<int>(bits >> 52);
  if (exponent == 0) return {0, {0, 0, 0}};  // zero: a smaller value than 2^-298 does not occur
  const std::uint64_t mantissa = (bits & 0xfffffffffffffU) | 0x10000000000000U;
  const int shift = exponent - 1075 - lowest_exponent;
  const int within = shift & 31;
  const std::uint64_t low = mantissa << within;
  const std::uint64_t high = within == 0 ? 0 : mantissa >> (64 - within);
  return {shift >> 5,
          {static_cast<std::uint32_t>(low), static_cast<std::uint32_t>(low >> 32),
           static_cast<std::uint32_t>(high)}};
}

/// The sum as a double, rounded once to nearest even. @param words  limbs many, each in 0 .. 2^63-1
[[nodiscard]] SHARDOPT_HD constexpr double to_double(const std::int64_t* words) noexcept {
  std::uint32_t digits[limbs + 2] = {};
  std::uint64_t carry = 0;
  int top = -1;
  for (int k = 0; k < limbs + 2; ++k) {
    const std::uint64_t word = k < limbs ? static_cast<std::uint64_t>(words[k]) : 0;
    const std::uint64_t low = (word & 0xffffffffU) + (carry & 0xffffffffU);
    digits[k] = static_cast<std::uint32_t>(low);
    carry = (carry >> 32) + (word >> 32) + (low >> 32);
    if (digits[k] != 0) top = k;
  }
  if (top < 0) return 0.0;
  // The leading 96 bits, shifted so that the highest set bit is bit 63 of `head`; what is below only matters
  // as sticky.
  const auto digit = [&digits](int k) -> std::uint64_t { return k >= 0 ? digits[k] : 0; };
  int zeros = 0;
  while (((digit(top) << zeros) & 0x80000000U) == 0) ++zeros;
  const std::uint64_t upper = (digit(top) << 32) | digit(top - 1);
  const std::uint64_t head = zeros == 0 ? upper : (upper << zeros) | (digit(top - 2) >> (32 - zeros));
  bool sticky = (zeros == 0 ? digit(top - 2) : (digit(top - 2) << zeros) & 0xffffffffU) != 0;
  for (int k = 0; k < top - 2; ++k) sticky = sticky || digits[k] != 0;
  std::uint64_t mantissa = head >> 11;
  const std::uint64_t rest = head & 0x7ffU;
  const bool up = rest > 0x400U || (rest == 0x400U && (sticky || (mantissa & 1U) != 0));
  mantissa += up ? 1 : 0;
  int exponent = 32 * top + 31 - zeros + lowest_exponent;  // of the highest bit
  if ((mantissa >> 53) != 0) {
    mantissa >>= 1;
    ++exponent;
  }
  return __builtin_bit_cast(
      double, (static_cast<std::uint64_t>(exponent + 1023) << 52) | (mantissa & 0xfffffffffffffU));
}

}  // namespace exact_sum
}  // namespace shardopt::inline v0
