// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_test_macros.hpp>
#include <shardopt/core/exact_sum.hpp>
#include <support/numbers.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

using namespace test;

namespace {

using Words = std::array<std::int64_t, so::exact_sum::Squares::limbs>;

void add(Words& words, double value) {
  const auto addend = so::exact_sum::Squares::split(value);
  for (int part = 0; part < 3; ++part)
    words.at(static_cast<std::size_t>(addend.first + part)) += addend.parts[part];
}

double sum_of(const std::vector<double>& values) {
  Words words{};
  for (const double value : values) add(words, value);
  return so::exact_sum::Squares::to_double(words.data());
}

/// The words of signed floats, as a step adds them, and their sum.
double sum_of_floats(const std::vector<float>& values) {
  using Floats = so::exact_sum::Floats;
  std::array<std::int64_t, Floats::limbs> words{};
  for (const float value : values) {
    const auto addend = Floats::split(static_cast<double>(value));
    for (int part = 0; part < 3; ++part) {
      const auto word = static_cast<std::int64_t>(addend.parts[part]);
      if (word != 0)
        words.at(static_cast<std::size_t>(addend.first + part)) += std::signbit(value) ? -word : word;
    }
  }
  return Floats::to_double(words.data());
}

constexpr double largest = static_cast<double>(std::numeric_limits<float>::max());

}  // namespace

TEST_CASE("One value comes back as it went in, over the whole range of squares of floats", "[core][host]") {
  CHECK(sum_of({}) == 0);
  CHECK(sum_of({0.0}) == 0);
  for (const double value : {0x1p-298, 0x1.8p-297, 1.0, 1e-30, 3.5, 1e30, largest * largest,
                             256 * largest * largest, 0x1.fffffffffffffp263}) {
    CAPTURE(value);
    CHECK(sum_of({value}) == value);
  }
  for (int exponent = -298; exponent <= 263; ++exponent) {
    const double power = std::ldexp(1.0, exponent);
    if (sum_of({power}) != power) FAIL("2^" << exponent);
  }
}

TEST_CASE("A sum is exact until it is rounded once, whatever the order", "[core][host]") {
  CHECK(sum_of({0x1p100, 0x1p-100, 0x1p47}) == 0x1p100 + 0x1p48);  // just above the tie: up
  CHECK(sum_of({0x1p100, 0x1p47}) == 0x1p100);                     // a tie goes to even: down
  CHECK(sum_of({0x1p100 + 0x1p48, 0x1p47}) == 0x1p100 + 0x1p49);   // and up
  CHECK(sum_of({0x1.fffffffffffffp100, 0x1p47}) == 0x1p101);       // a carry into the next power
  std::vector<double> values;
  for (std::uint64_t k = 0; k < 2000; ++k) {
    const auto word = noise(77, k);
    const float value = static_cast<float>(
        std::ldexp(static_cast<double>(word % 16777216), static_cast<int>(word >> 32) % 200 - 130));
    values.push_back(static_cast<double>(value) * static_cast<double>(value));
  }
  ExactSum expected;
  for (const double value : values) expected.add(value);
  CHECK(sum_of(values) == expected.value());
  std::reverse(values.begin(), values.end());
  CHECK(sum_of(values) == expected.value());
  std::sort(values.begin(), values.end());
  CHECK(sum_of(values) == expected.value());
}

TEST_CASE(
    "Words take two thousand million additions of the largest value, and sums of ranks' words are the sum",
    "[core][host]") {
  Words words{};
  add(words, largest * largest);
  for (std::int64_t& word : words) word *= 2147483647;
  ExactSum expected;
  for (int bit = 0; bit < 31; ++bit) expected.add(std::ldexp(largest * largest, bit));
  CHECK(so::exact_sum::Squares::to_double(words.data()) == expected.value());

  Words all{};
  for (int rank = 0; rank < 5; ++rank) {
    Words mine{};
    for (std::uint64_t k = 0; k < 100; ++k) add(mine, static_cast<double>(noise(rank, k) >> 11) * 0x1p-60);
    for (std::size_t k = 0; k < all.size(); ++k) all[k] += mine[k];
  }
  ExactSum together;
  for (int rank = 0; rank < 5; ++rank) {
    for (std::uint64_t k = 0; k < 100; ++k) together.add(static_cast<double>(noise(rank, k) >> 11) * 0x1p-60);
  }
  CHECK(so::exact_sum::Squares::to_double(all.data()) == together.value());
}

TEST_CASE("Signed sums of floats are exact and cancel exactly", "[core][host]") {
  const auto sum = sum_of_floats;
  const float large = std::numeric_limits<float>::max();
  CHECK(sum({}) == 0);
  CHECK(sum({large, 0x1p-149f, -large}) == 0x1p-149);
  CHECK(sum({-large, -0x1p-149f, large}) == -0x1p-149);
  CHECK(sum({large, -large}) == 0);
  CHECK(sum({-1.5f, -2.25f}) == -3.75);
  CHECK(sum({1e30f, 1.0f, -1e30f, 1.0f}) == 2);
  CHECK(sum(std::vector<float>(1000, -large)) == -1000 * static_cast<double>(large));
  std::vector<float> values;
  ExactSum expected;
  for (std::uint64_t k = 0; k < 3000; ++k) {
    const double mantissa = static_cast<double>(noise(5, k) % 16777216) - 8388608;
    values.push_back(static_cast<float>(std::ldexp(mantissa, static_cast<int>(noise(6, k) % 60) - 40)));
    expected.add(static_cast<double>(values.back()));
  }
  CHECK(sum(values) == expected.value());
}

TEST_CASE("Floats of every exponent come back as they went in, and cancel what is larger by one bit",
          "[core][host]") {
  constexpr std::array<std::uint32_t, 5> mantissas{0x000000, 0x000001, 0x2aaaab, 0x555555, 0x7fffff};
  for (std::uint32_t exponent = 0; exponent < 255; ++exponent) {
    CAPTURE(exponent);
    for (const std::uint32_t mantissa : mantissas) {
      const auto value = std::bit_cast<float>(exponent << 23 | mantissa);
      const double exact = static_cast<double>(value);
      REQUIRE(sum_of_floats({value}) == exact);
      REQUIRE(sum_of_floats({-value}) == -exact);
      REQUIRE(sum_of_floats({value, value, value}) == 3 * exact);
      const float next = std::nextafter(value, std::numeric_limits<float>::max());
      REQUIRE(sum_of_floats({next, -value}) == static_cast<double>(next) - exact);
    }
  }
}

TEST_CASE("Sums of floats of neighbouring exponents are the exact sum, rounded once", "[core][host]") {
  for (int exponent = -149; exponent <= 100; ++exponent) {
    CAPTURE(exponent);
    std::vector<float> values;
    ExactSum expected;
    for (std::uint64_t k = 0; k < 40; ++k) {
      const double mantissa = static_cast<double>(noise(exponent + 200, k) % 16777216) - 8388608;
      values.push_back(static_cast<float>(std::ldexp(mantissa, exponent + static_cast<int>(k % 4))));
      expected.add(static_cast<double>(values.back()));
    }
    REQUIRE(sum_of_floats(values) == expected.value());
  }
}
