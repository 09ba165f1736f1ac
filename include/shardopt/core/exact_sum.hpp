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
  std::uint64_t leading[3] = {0, 0, 0};  // the highest digit that is not zero and the two below it
  int top = -1;                          // its place
  bool sticky = false;                   // whether any digit below those is not zero
  std::uint64_t carry = 0;
  std::uint64_t one_below = 0;
  std::uint64_t two_below = 0;
  bool rest_below = false;
  for (int k = 0; k < limbs; ++k) {
    const auto word = static_cast<std::uint64_t>(words[k]);
    const std::uint64_t low = (word & 0xffffffffU) + (carry & 0xffffffffU);
    const std::uint64_t digit = low & 0xffffffffU;
    carry = (carry >> 32) + (word >> 32) + (low >> 32);
    if (digit != 0) {
      top = k;
      leading[0] = digit;
      leading[1] = one_below;
      leading[2] = two_below;
      sticky = rest_below;
    }
    rest_below = rest_below || two_below != 0;
    two_below = one_below;
    one_below = digit;
  }
  if (top < 0) return 0.0;
  int zeros = 0;
  while (((leading[0] << zeros) & 0x80000000U) == 0) ++zeros;
  // The leading 96 bits, shifted so that the highest set bit is bit 63 of `head`; what is below counts as
  // sticky.
  const std::uint64_t head =
      (leading[0] << (32 + zeros)) | (leading[1] << zeros) | (leading[2] >> (32 - zeros));
  sticky = sticky || ((leading[2] << zeros) & 0xffffffffU) != 0;
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
