// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

namespace awkward {

/// A small generator whose numbers are the same with every library (splitmix64).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t bits64() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
  std::uint32_t bits32() { return static_cast<std::uint32_t>(bits64() >> 32); }
  /// Any float: every sign, exponent (subnormals, infinities and NaNs too) and fraction.
  float any() { return std::bit_cast<float>(bits32()); }
  /// A float of magnitude 2^-8 to 2^8, where operations neither overflow nor vanish.
  float usual() {
    const std::uint32_t bits = bits32();
    return std::bit_cast<float>((bits & 0x807fffffU) | ((119U + (bits >> 23) % 16U) << 23));
  }

 private:
  std::uint64_t state_;
};

/// Zeros, the borders of the subnormals, of overflow and of integers, infinities, NaNs; both signs.
inline std::vector<float> specials() {
  std::vector<float> values;
  for (const std::uint32_t bits :
       {0x00000000U, 0x00000001U, 0x00000002U, 0x007fffffU, 0x00800000U, 0x00800001U, 0x01000000U,
        0x33000000U, 0x33800000U, 0x3effffffU, 0x3f000000U, 0x3f7fffffU, 0x3f800000U, 0x3f800001U,
        0x40000000U, 0x40400000U, 0x4b7fffffU, 0x4b800000U, 0x5f800000U, 0x7e800000U, 0x7f7fffffU,
        0x7f800000U, 0x7fc00000U, 0x7fc00001U, 0x7f800001U}) {
    values.push_back(std::bit_cast<float>(bits));
    values.push_back(std::bit_cast<float>(bits | 0x80000000U));
  }
  return values;
}

inline bool is_nan(float value) { return (std::bit_cast<std::uint32_t>(value) & 0x7fffffffU) > 0x7f800000U; }
inline bool is_nan(double value) {
  return (std::bit_cast<std::uint64_t>(value) & 0x7fffffffffffffffULL) > 0x7ff0000000000000ULL;
}

/// The same bits, or both NaN.
inline bool same(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b) || (is_nan(a) && is_nan(b));
}
inline bool same(double a, double b) {
  return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b) || (is_nan(a) && is_nan(b));
}

}  // namespace awkward
