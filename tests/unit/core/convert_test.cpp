// SPDX-License-Identifier: Apache-2.0
#include <shardopt/core/convert.hpp>
//
#include <shardopt/core/pack_memory.hpp>
#include "awkward_floats.hpp"

#include <array>
#include <bit>
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <cstdint>
#include <limits>

using awkward::is_nan;
using awkward::same;
using shardopt::bf16;
using shardopt::fp16;

namespace {

/// A 16-bit format by its definition: this many fraction bits, normal from 2^lowest on, infinite from 2^top
/// on.
struct Format {
  int fraction_bits;
  int lowest;
  int top;
};
template <class T>
constexpr Format format = {};
template <>
constexpr Format format<bf16> = {7, -126, 128};
template <>
constexpr Format format<fp16> = {10, -14, 16};

/// What a pattern means, by the definition.
template <class T>
double meaning(std::uint16_t bits) {
  const int exponent_bits = 15 - format<T>.fraction_bits;
  const int exponent = (bits >> format<T>.fraction_bits) & ((1 << exponent_bits) - 1);
  const int fraction = bits & ((1 << format<T>.fraction_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return fraction != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  const int significand = exponent == 0 ? fraction : fraction + (1 << format<T>.fraction_bits);
  return sign * std::ldexp(significand,
                           (exponent == 0 ? 1 : exponent) - 1 + format<T>.lowest - format<T>.fraction_bits);
}

/// The nearest number of the format, ties to even, as a double; by std::nearbyint on the format's own grid.
template <class T>
double nearest(float value) {
  if (!std::isfinite(value) || value == 0.0f) return static_cast<double>(value);
  int exponent = 0;
  std::frexp(value, &exponent);
  const int unit = std::max(exponent - 1, format<T>.lowest) - format<T>.fraction_bits;
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(static_cast<double>(value), -unit)), unit);
  return std::fabs(rounded) >= std::ldexp(1.0, format<T>.top)
             ? std::copysign(std::numeric_limits<double>::infinity(), rounded)
             : rounded;
}

template <class T>
constexpr std::uint16_t canonical_nan = 0;
template <>
constexpr std::uint16_t canonical_nan<bf16> = 0x7fc0;
template <>
constexpr std::uint16_t canonical_nan<fp16> = 0x7e00;

/// Whether a conversion down is right; no Catch macro, for speed.
template <class T>
bool rounds_right(float value) {
  const std::uint16_t bits = shardopt::from_float<T>(value).bits;
  if (is_nan(value)) return bits == canonical_nan<T>;
  return std::bit_cast<std::uint64_t>(meaning<T>(bits)) == std::bit_cast<std::uint64_t>(nearest<T>(value));
}

}  // namespace

TEMPLATE_TEST_CASE("Every 16-bit pattern means what its format says", "[core][convert][host]", bf16, fp16) {
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const TestType element{static_cast<std::uint16_t>(bits)};
    const float value = shardopt::to_float(element);
    CAPTURE(bits, value);
    REQUIRE(same(static_cast<double>(value), meaning<TestType>(element.bits)));
    if (is_nan(value)) {
      REQUIRE((std::bit_cast<std::uint32_t>(value) >> 31) == (bits >> 15));  // NaNs keep their sign
      REQUIRE(shardopt::from_float<TestType>(value).bits == canonical_nan<TestType>);
    } else {
      REQUIRE(shardopt::from_float<TestType>(value) == element);
    }
  }
}

TEMPLATE_TEST_CASE(
    "Numbers halfway between two 16-bit ones go to the even one, their neighbours to the nearer",
    "[core][convert][host]", bf16, fp16) {
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const double here = meaning<TestType>(static_cast<std::uint16_t>(bits));
    if (!std::isfinite(here)) continue;
    const double next = meaning<TestType>(static_cast<std::uint16_t>(bits + 1U));
    const double end =
        std::copysign(std::ldexp(1.0, format<TestType>.top), here);  // where the next finite one would be
    const auto middle = static_cast<float>((here + (std::isfinite(next) ? next : end)) / 2.0);
    CAPTURE(bits, here, middle);
    REQUIRE(rounds_right<TestType>(middle));
    REQUIRE(rounds_right<TestType>(std::nextafter(middle, 0.0f)));
    REQUIRE(rounds_right<TestType>(std::nextafter(middle, std::copysign(3.4e38f, middle))));
  }
}

TEMPLATE_TEST_CASE("Any float rounds to the nearest 16-bit number", "[core][convert][host]", bf16, fp16) {
  for (const float value : awkward::specials()) {
    CAPTURE(value);
    REQUIRE(rounds_right<TestType>(value));
  }
  awkward::Random random(4);
  std::uint32_t wrong = 0;
  std::uint32_t first_wrong = 0;
  for (int k = 0; k < 5'000'000; ++k) {
    std::uint32_t bits = random.bits32();
    if (k % 2 == 0)
      bits = (bits & 0x807fffffU) | ((90U + (bits >> 23) % 60U) << 23);  // about the range of fp16
    if (!rounds_right<TestType>(std::bit_cast<float>(bits)) && wrong++ == 0) first_wrong = bits;
  }
  CAPTURE(first_wrong);
  REQUIRE(wrong == 0);
}

TEST_CASE("Conversions of floats leave every bit alone", "[core][convert][host]") {
  for (const float value : awkward::specials()) {
    REQUIRE(std::bit_cast<std::uint32_t>(shardopt::to_float(value)) == std::bit_cast<std::uint32_t>(value));
    REQUIRE(std::bit_cast<std::uint32_t>(shardopt::from_float<float>(value)) ==
            std::bit_cast<std::uint32_t>(value));
  }
}

#if SHARDOPT_HOST_AVX2

namespace {

template <class T>
SHARDOPT_TARGET_AVX2 std::array<float, 8> up(const T* from) {
  std::array<float, 8> result{};
  shardopt::store_pack(result.data(), shardopt::load_pack(from));
  return result;
}

template <class T>
SHARDOPT_TARGET_AVX2 std::array<T, 8> down(const float* from) {
  std::array<T, 8> result{};
  shardopt::store_pack(result.data(), shardopt::load_pack(from));
  return result;
}

}  // namespace

TEMPLATE_TEST_CASE("Packs convert as single elements do", "[core][convert][host]", bf16, fp16) {
  for (std::uint32_t bits = 0; bits < 0x10000U; bits += 8) {
    std::array<TestType, 8> elements{};
    for (std::uint32_t i = 0; i < 8; ++i) elements[i].bits = static_cast<std::uint16_t>(bits + i);
    const auto values = up(elements.data());
    for (std::size_t i = 0; i < 8; ++i) {
      CAPTURE(bits, i);
      REQUIRE(std::bit_cast<std::uint32_t>(values[i]) ==
              std::bit_cast<std::uint32_t>(shardopt::to_float(elements[i])));
    }
  }
  awkward::Random random(5);
  for (int k = 0; k < 100'000; ++k) {
    std::array<float, 8> values{};
    for (float& value : values) value = k % 2 == 0 ? random.any() : random.usual();
    if (k % 3 == 0) {  // ties and their neighbours, of small numbers too
      for (float& value : values) {
        value = std::bit_cast<float>((random.bits32() & 0xbfffe000U) | (random.bits32() % 3U + 0xfffU));
      }
    }
    const auto elements = down<TestType>(values.data());
    for (std::size_t i = 0; i < 8; ++i) {
      CAPTURE(values[i]);
      REQUIRE(elements[i] == shardopt::from_float<TestType>(values[i]));
    }
  }
}

#endif
