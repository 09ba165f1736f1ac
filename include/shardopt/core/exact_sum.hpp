// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/config.hpp>

#include <cstdint>

namespace shardopt::inline v0 {

/// Exact sums: integers in 32-bit limbs of signed 64-bit words (carry-save), so that the order of additions
/// cannot matter: words are added by atomics and by one all-reduce of int64. A word takes 2^31 additions.
namespace exact_sum {

/// The three limbs that one number touches: words[first + k] += parts[k].
struct Addend {
  /// Word that the lowest part is added to.
  int first;
  /// 32 bits for each of three consecutive words.
  std::uint32_t parts[3];
};

/// A format of sums: limb k weighs 2^(32 k + lowest_exponent).
template <int limb_count, int lowest>
struct Format {
  /// Words of a sum.
  static constexpr int limbs = limb_count;
  /// Binary exponent of the lowest bit.
  static constexpr int lowest_exponent = lowest;

  /// Splits a number's magnitude. @pre finite, zero or a multiple of 2^lowest_exponent, and within the limbs
  [[nodiscard]] static SHARDOPT_HD constexpr Addend split(double value) noexcept {
    const auto bits = __builtin_bit_cast(std::uint64_t, value) & 0x7fffffffffffffffU;
    const int exponent = static_cast<int>(bits >> 52);
    if (exponent == 0) return {0, {0, 0, 0}};  // zero: doubles below 2^-1022 do not occur
    const std::uint64_t mantissa = (bits & 0xfffffffffffffU) | 0x10000000000000U;
    const int shift = exponent - 1075 - lowest_exponent;
    if (shift < 0) {  // the bits that fall off are zero, those that stay may be more than one part's
      const std::uint64_t kept = shift > -64 ? mantissa >> -shift : 0;
      return {0, {static_cast<std::uint32_t>(kept), static_cast<std::uint32_t>(kept >> 32), 0}};
    }
    const int within = shift & 31;
    const std::uint64_t low = mantissa << within;
    const std::uint64_t high = within == 0 ? 0 : mantissa >> (64 - within);
    return {shift >> 5,
            {static_cast<std::uint32_t>(low), static_cast<std::uint32_t>(low >> 32),
             static_cast<std::uint32_t>(high)}};
  }

  /// The sum as a double, rounded once to nearest even. @param words  `limbs` many, of any sign
  [[nodiscard]] static SHARDOPT_HD constexpr double to_double(const std::int64_t* words) noexcept {
    std::int64_t carry = 0;
    for (int k = 0; k < limbs; ++k) carry = (words[k] + carry) >> 32;
    return carry < 0 ? -magnitude(words, -1) : magnitude(words, 1);
  }

 private:
  /// The leading digits of a sum, to the base 2^32.
  struct Digits {
    std::uint64_t leading[3] = {0, 0, 0};  ///< the highest digit that is not zero and the two below it
    int top = -1;                          ///< its place, or -1
    bool sticky = false;                   ///< whether any digit below those is not zero
  };

  /// @pre sign · sum >= 0
  [[nodiscard]] static SHARDOPT_HD constexpr Digits digits(const std::int64_t* words,
                                                           std::int64_t sign) noexcept {
    Digits result;
    std::int64_t carry = 0;
    std::uint64_t one_below = 0;
    std::uint64_t two_below = 0;
    bool rest_below = false;
    for (int k = 0; k < limbs; ++k) {
      carry += sign * words[k];
      const std::uint64_t digit = static_cast<std::uint64_t>(carry) & 0xffffffffU;
      carry >>= 32;
      if (digit != 0) {
        result.top = k;
        result.leading[0] = digit;
        result.leading[1] = one_below;
        result.leading[2] = two_below;
        result.sticky = rest_below;
      }
      rest_below = rest_below || two_below != 0;
      two_below = one_below;
      one_below = digit;
    }
    return result;
  }

  /// @pre sign · sum >= 0
  [[nodiscard]] static SHARDOPT_HD constexpr double magnitude(const std::int64_t* words,
                                                              std::int64_t sign) noexcept {
    const Digits sum = digits(words, sign);
    const std::uint64_t(&leading)[3] = sum.leading;
    if (sum.top < 0) return 0.0;
    int zeros = 0;
    while (((leading[0] << zeros) & 0x80000000U) == 0) ++zeros;
    // The leading 96 bits, shifted so that the highest set bit is bit 63 of `head`; what is below counts as
    // sticky.
    const std::uint64_t head =
        (leading[0] << (32 + zeros)) | (leading[1] << zeros) | (leading[2] >> (32 - zeros));
    const bool sticky = sum.sticky || ((leading[2] << zeros) & 0xffffffffU) != 0;
    std::uint64_t mantissa = head >> 11;
    const std::uint64_t rest = head & 0x7ffU;
    const bool up = rest > 0x400U || (rest == 0x400U && (sticky || (mantissa & 1U) != 0));
    mantissa += up ? 1 : 0;
    int exponent = 32 * sum.top + 31 - zeros + lowest_exponent;  // of the highest bit
    if ((mantissa >> 53) != 0) {
      mantissa >>= 1;
      ++exponent;
    }
    return __builtin_bit_cast(
        double, (static_cast<std::uint64_t>(exponent + 1023) << 52) | (mantissa & 0xfffffffffffffU));
  }
};

/// Sums of grains' sums of squares of floats: multiples of 2^-298 (the smallest square of a float) below
/// 2^264; 88 bits are left for the number of grains.
using Squares = Format<22, -352>;

/// Signed sums of floats: multiples of 2^-149 below 2^128; 32 bits are left for their number.
using Floats = Format<10, -160>;

}  // namespace exact_sum
}  // namespace shardopt::inline v0
