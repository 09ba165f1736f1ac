// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/dtype.hpp>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

/// Numbers for tests, made without the library: roundings by the definition, exact sums, reproducible noise.
namespace test {

namespace so = shardopt;

/// The bits of an element, widened.
template <class T>
[[nodiscard]] std::uint32_t bits_of(T element) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &element, sizeof element);
  return bits;
}

template <class T>
[[nodiscard]] T from_bits(std::uint32_t bits) {
  T element;
  std::memcpy(&element, &bits, sizeof element);
  return element;
}

/// What makes up a 16-bit format.
template <class T>
struct Format {
  static constexpr bool is_bf16 = so::dtype_of<T> == so::Dtype::bf16;
  static constexpr int digits = is_bf16 ? 8 : 11;      ///< of the significand, the hidden one included
  static constexpr int lowest = is_bf16 ? -126 : -14;  ///< exponent of the smallest normal number
  static constexpr int highest = is_bf16 ? 127 : 15;   ///< exponent of the largest
};

/// The element nearest to a number, ties to even; every 16-bit NaN is the same.
template <class T>
[[nodiscard]] T rounded(double value) {
  if constexpr (std::is_same_v<T, float>) {
    return static_cast<float>(value);
  } else {
    using F = Format<T>;
    constexpr std::uint32_t hidden = 1U << (F::digits - 1);
    constexpr std::uint32_t infinity = static_cast<std::uint32_t>(F::highest - F::lowest + 2)
                                       << (F::digits - 1);
    if (std::isnan(value)) return from_bits<T>(infinity | (hidden >> 1));
    const std::uint32_t sign = std::signbit(value) ? 0x8000U : 0U;
    const double magnitude = std::fabs(value);
    if (magnitude == 0) return from_bits<T>(sign);
    if (std::isinf(magnitude)) return from_bits<T>(sign | infinity);
    const int exponent = std::ilogb(magnitude) < F::lowest ? F::lowest : std::ilogb(magnitude);
    if (exponent > F::highest) return from_bits<T>(sign | infinity);
    const auto quotient =
        static_cast<std::uint32_t>(std::nearbyint(std::ldexp(magnitude, F::digits - 1 - exponent)));
    if (quotient < hidden) return from_bits<T>(sign | quotient);  // subnormal
    const std::uint32_t field = static_cast<std::uint32_t>(exponent - F::lowest + 1) << (F::digits - 1);
    return from_bits<T>(sign |
                        (field + (quotient - hidden)));  // a carry ends in the exponent, or in infinity
  }
}

/// The number that an element holds, exactly.
template <class T>
[[nodiscard]] double value_of(T element) {
  if constexpr (std::is_same_v<T, float>) {
    return static_cast<double>(element);
  } else {
    using F = Format<T>;
    const std::uint32_t bits = bits_of(element);
    const std::uint32_t fraction = bits & ((1U << (F::digits - 1)) - 1U);
    const auto field = static_cast<int>((bits & 0x7fffU) >> (F::digits - 1));
    double magnitude = 0;
    if (field == F::highest - F::lowest + 2) {
      magnitude =
          fraction == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
    } else if (field == 0) {
      magnitude = std::ldexp(static_cast<double>(fraction), F::lowest - F::digits + 1);
    } else {
      magnitude = std::ldexp(static_cast<double>(fraction | (1U << (F::digits - 1))),
                             field - 1 + F::lowest - F::digits + 1);
    }
    return (bits & 0x8000U) != 0 ? -magnitude : magnitude;
  }
}

/// Whether two elements are the same: by bits, or both NaN.
template <class T>
[[nodiscard]] bool same(T a, T b) {
  return bits_of(a) == bits_of(b) || (std::isnan(value_of(a)) && std::isnan(value_of(b)));
}

/// An element as text: its value and its bits.
template <class T>
[[nodiscard]] std::string text_of(T element) {
  char text[64];
  std::snprintf(text, sizeof text, "%.9g (0x%x)", value_of(element), bits_of(element));
  return text;
}

/// The sum of doubles, rounded once (Shewchuk 1997: partial sums that do not overlap).
class ExactSum {
 public:
  void add(double x) {
    std::size_t kept = 0;
    for (double y : partials_) {
      if (std::fabs(x) < std::fabs(y)) std::swap(x, y);
      const double high = x + y;
      const double low = y - (high - x);
      if (low != 0) partials_[kept++] = low;
      x = high;
    }
    partials_.resize(kept);
    partials_.push_back(x);
  }

  [[nodiscard]] double value() const {
    if (partials_.empty()) return 0;
    std::size_t k = partials_.size() - 1;
    double high = partials_[k];
    double low = 0;
    while (k > 0 && low == 0) {
      const double x = high;
      const double y = partials_[--k];
      high = x + y;
      low = y - (high - x);
    }
    // A tie that what lies below decides.
    if (k > 0 && ((low < 0 && partials_[k - 1] < 0) || (low > 0 && partials_[k - 1] > 0))) {
      const double twice = low * 2;
      const double other = high + twice;
      if (twice == other - high) high = other;
    }
    return high;
  }

 private:
  std::vector<double> partials_;
};

/// Reproducible noise: a 64-bit word that depends on all arguments.
template <class... Words>
[[nodiscard]] std::uint64_t noise(Words... words) {
  std::uint64_t state = 0x243f6a8885a308d3U;
  for (const std::uint64_t word : {static_cast<std::uint64_t>(words)...}) {
    state ^= word + 0x9e3779b97f4a7c15U + (state << 6) + (state >> 2);
    state *= 0xd6e8feb86659fd93U;
    state ^= state >> 32;
  }
  return state;
}

}  // namespace test
