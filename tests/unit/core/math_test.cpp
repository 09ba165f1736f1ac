// SPDX-License-Identifier: Apache-2.0
#include <shardopt/core/math.hpp>
//
#include <shardopt/core/pack_memory.hpp>
#include "awkward_floats.hpp"

#include <array>
#include <catch2/catch_test_macros.hpp>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace math = shardopt::math;
using awkward::same;

namespace {

/// Pairs of awkward numbers, all specials with all specials among them.
std::vector<std::pair<float, float>> pairs() {
  std::vector<std::pair<float, float>> result;
  for (const float a : awkward::specials()) {
    for (const float b : awkward::specials()) result.emplace_back(a, b);
  }
  awkward::Random random(1);
  for (int k = 0; k < 20000; ++k) {
    result.emplace_back(random.any(), random.any());
    result.emplace_back(random.usual(), random.usual());
  }
  return result;
}

}  // namespace

TEST_CASE("Single-precision operations round the exact result once", "[core][math][host]") {
  // Double has more than twice the precision of float, so rounding its result again gives the correctly
  // rounded one.
  for (const auto& [a, b] : pairs()) {
    const auto x = static_cast<double>(a);
    const auto y = static_cast<double>(b);
    CAPTURE(a, b);
    REQUIRE(same(math::add(a, b), static_cast<float>(x + y)));
    REQUIRE(same(math::sub(a, b), static_cast<float>(x - y)));
    REQUIRE(same(math::mul(a, b), static_cast<float>(x * y)));
    REQUIRE(same(math::div(a, b), static_cast<float>(x / y)));
    REQUIRE(same(math::sqrt(a), static_cast<float>(std::sqrt(x))));
    REQUIRE(same(math::widen(a), x));
    REQUIRE(same(math::narrow(x * y), static_cast<float>(x * y)));
  }
}

TEST_CASE("A fused multiply-add rounds once, in single and double precision", "[core][math][host]") {
  awkward::Random random(2);
  for (const auto& [a, b] : pairs()) {
    const float c = random.usual();
    CAPTURE(a, b, c);
    REQUIRE(same(math::fma(a, b, c), std::fma(a, b, c)));
    REQUIRE(same(math::fma(a, b, math::neg(math::mul(a, b))), std::fma(a, b, -(a * b))));
    const double x = static_cast<double>(a) / 3.0;
    REQUIRE(same(math::fma(x, x, 1.0), std::fma(x, x, 1.0)));
  }
}

TEST_CASE("Double-precision operations are the processor's", "[core][math][host]") {
  for (const auto& [a, b] : pairs()) {
    const double x = static_cast<double>(a) / 3.0;
    const double y = static_cast<double>(b) * 1.1;
    CAPTURE(x, y);
    REQUIRE(same(math::add(x, y), x + y));
    REQUIRE(same(math::sub(x, y), x - y));
    REQUIRE(same(math::mul(x, y), x * y));
    REQUIRE(same(math::div(x, y), x / y));
    REQUIRE(same(math::sqrt(x), std::sqrt(x)));
    REQUIRE(math::less(x, y) == (x < y));
    REQUIRE(math::less_equal(x, y) == (x <= y));
    REQUIRE(math::equal(x, y) == (x == y));
    REQUIRE(math::is_finite(x) == std::isfinite(x));
    REQUIRE(math::is_nan(x) == std::isnan(x));
    REQUIRE(same(math::neg(x), -x));
    REQUIRE(same(math::abs(x), std::fabs(x)));
    REQUIRE(same(math::copysign(x, y), std::copysign(x, y)));
  }
}

TEST_CASE("Comparisons with a NaN are false, zeros are equal whatever their signs", "[core][math][host]") {
  for (const auto& [a, b] : pairs()) {
    CAPTURE(a, b);
    REQUIRE(math::less(a, b) == (a < b));
    REQUIRE(math::less_equal(a, b) == (a <= b));
    REQUIRE(math::greater(a, b) == (a > b));
    REQUIRE(math::greater_equal(a, b) == (a >= b));
    REQUIRE(math::equal(a, b) == (a == b));
    REQUIRE(math::is_nan(a) == std::isnan(a));
    REQUIRE(math::is_finite(a) == std::isfinite(a));
  }
}

TEST_CASE("Maximum and minimum hand on NaN, and the second of two equal numbers", "[core][math][host]") {
  for (const auto& [a, b] : pairs()) {
    CAPTURE(a, b);
    const float larger = std::isnan(a) ? a : std::isnan(b) ? b : a > b ? a : b;
    const float smaller = std::isnan(a) ? a : std::isnan(b) ? b : a < b ? a : b;
    REQUIRE(same(math::maximum(a, b), larger));
    REQUIRE(same(math::minimum(a, b), smaller));
  }
  REQUIRE(same(math::maximum(0.0f, -0.0f), -0.0f));
  REQUIRE(same(math::minimum(-0.0f, 0.0f), 0.0f));
}

TEST_CASE("Changing a sign touches the sign bit only", "[core][math][host]") {
  for (const auto& [a, b] : pairs()) {
    CAPTURE(a, b);
    const auto bits = std::bit_cast<std::uint32_t>(a);
    REQUIRE(std::bit_cast<std::uint32_t>(math::neg(a)) == (bits ^ 0x80000000U));
    REQUIRE(std::bit_cast<std::uint32_t>(math::abs(a)) == (bits & 0x7fffffffU));
    REQUIRE(same(math::copysign(a, b), std::copysign(a, b)));
  }
}

TEST_CASE("An integer power is as exact as repeated squaring can be", "[core][math][host]") {
  REQUIRE(math::pow(0.9, 0) == 1.0);
  REQUIRE(math::pow(0.9, 1) == 0.9);
  REQUIRE(math::pow(0.0, 0) == 1.0);
  REQUIRE(math::pow(0.0, 5) == 0.0);
  REQUIRE(math::pow(2.0, 1023) == 0x1p1023);
  REQUIRE(math::pow(0.5, 1074) == 0x1p-1074);
  REQUIRE(math::pow(0.5, 1U << 20U) == 0.0);
  for (const double base : {0.9, 0.95, 0.98, 0.99, 0.999, 0.9999, 0.999999, 0.99999999}) {
    for (const std::uint64_t exponent :
         {2ULL, 3ULL, 10ULL, 255ULL, 256ULL, 257ULL, 1000ULL, 100000ULL, 16777217ULL}) {
      CAPTURE(base, exponent);
      const long double exact = std::pow(static_cast<long double>(base), static_cast<long double>(exponent));
      const long double error = std::fabs(static_cast<long double>(math::pow(base, exponent)) - exact);
      REQUIRE(error <= exact * 1.2e-16L * static_cast<long double>(exponent) + 5e-324L);
    }
  }
}

#if SHARDOPT_HOST_AVX2

namespace {

constexpr int lanes = shardopt::Pack::size;
using Lanes = std::array<float, lanes>;

struct PackResults {
  Lanes add, sub, mul, div, fma, sqrt, abs, neg, copysign, maximum, minimum, less, less_equal, greater,
      greater_equal, equal, nan, finite, both, either, chosen;
};

SHARDOPT_TARGET_AVX2 PackResults by_packs(const Lanes& a, const Lanes& b, const Lanes& c) {
  using shardopt::Pack;
  const Pack x = shardopt::load_pack(a.data());
  const Pack y = shardopt::load_pack(b.data());
  const Pack z = shardopt::load_pack(c.data());
  const Pack one(1.0f);
  const Pack zero(0.0f);
  PackResults r{};
  shardopt::store_pack(r.add.data(), math::add(x, y));
  shardopt::store_pack(r.sub.data(), math::sub(x, y));
  shardopt::store_pack(r.mul.data(), math::mul(x, y));
  shardopt::store_pack(r.div.data(), math::div(x, y));
  shardopt::store_pack(r.fma.data(), math::fma(x, y, z));
  shardopt::store_pack(r.sqrt.data(), math::sqrt(x));
  shardopt::store_pack(r.abs.data(), math::abs(x));
  shardopt::store_pack(r.neg.data(), math::neg(x));
  shardopt::store_pack(r.copysign.data(), math::copysign(x, y));
  shardopt::store_pack(r.maximum.data(), math::maximum(x, y));
  shardopt::store_pack(r.minimum.data(), math::minimum(x, y));
  shardopt::store_pack(r.less.data(), math::select(math::less(x, y), one, zero));
  shardopt::store_pack(r.less_equal.data(), math::select(math::less_equal(x, y), one, zero));
  shardopt::store_pack(r.greater.data(), math::select(math::greater(x, y), one, zero));
  shardopt::store_pack(r.greater_equal.data(), math::select(math::greater_equal(x, y), one, zero));
  shardopt::store_pack(r.equal.data(), math::select(math::equal(x, y), one, zero));
  shardopt::store_pack(r.nan.data(), math::select(math::is_nan(x), one, zero));
  shardopt::store_pack(r.finite.data(), math::select(math::is_finite(x), one, zero));
  const shardopt::PackMask not_above = math::logical_not(math::greater(x, y));
  shardopt::store_pack(r.both.data(),
                       math::select(math::logical_and(not_above, math::is_finite(x)), one, zero));
  shardopt::store_pack(r.either.data(),
                       math::select(math::logical_or(not_above, math::is_finite(x)), one, zero));
  shardopt::store_pack(r.chosen.data(), math::select(math::less(x, y), x, y));
  return r;
}

}  // namespace

TEST_CASE("A pack gives in each lane the bits of the same operation on floats", "[core][math][host]") {
  awkward::Random random(3);
  const auto all = pairs();
  for (std::size_t k = 0; k + lanes <= all.size(); k += lanes) {
    Lanes a{};
    Lanes b{};
    Lanes c{};
    for (std::size_t i = 0; i < lanes; ++i) {
      a[i] = all[k + i].first;
      b[i] = all[k + i].second;
      c[i] = random.usual();
    }
    const PackResults r = by_packs(a, b, c);
    for (std::size_t i = 0; i < lanes; ++i) {
      CAPTURE(a[i], b[i], c[i]);
      REQUIRE(same(r.add[i], math::add(a[i], b[i])));
      REQUIRE(same(r.sub[i], math::sub(a[i], b[i])));
      REQUIRE(same(r.mul[i], math::mul(a[i], b[i])));
      REQUIRE(same(r.div[i], math::div(a[i], b[i])));
      REQUIRE(same(r.fma[i], math::fma(a[i], b[i], c[i])));
      REQUIRE(same(r.sqrt[i], math::sqrt(a[i])));
      REQUIRE(same(r.abs[i], math::abs(a[i])));
      REQUIRE(same(r.neg[i], math::neg(a[i])));
      REQUIRE(same(r.copysign[i], math::copysign(a[i], b[i])));
      REQUIRE(same(r.maximum[i], math::maximum(a[i], b[i])));
      REQUIRE(same(r.minimum[i], math::minimum(a[i], b[i])));
      REQUIRE((r.less[i] != 0.0f) == math::less(a[i], b[i]));
      REQUIRE((r.less_equal[i] != 0.0f) == math::less_equal(a[i], b[i]));
      REQUIRE((r.greater[i] != 0.0f) == math::greater(a[i], b[i]));
      REQUIRE((r.greater_equal[i] != 0.0f) == math::greater_equal(a[i], b[i]));
      REQUIRE((r.equal[i] != 0.0f) == math::equal(a[i], b[i]));
      REQUIRE((r.nan[i] != 0.0f) == math::is_nan(a[i]));
      REQUIRE((r.finite[i] != 0.0f) == math::is_finite(a[i]));
      REQUIRE((r.both[i] != 0.0f) == (!math::greater(a[i], b[i]) && math::is_finite(a[i])));
      REQUIRE((r.either[i] != 0.0f) == (!math::greater(a[i], b[i]) || math::is_finite(a[i])));
      REQUIRE(same(r.chosen[i], math::select(math::less(a[i], b[i]), a[i], b[i])));
    }
  }
}

namespace {

SHARDOPT_TARGET_AVX2 Lanes mixed(const Lanes& a) {
  const shardopt::Pack x = shardopt::load_pack(a.data());
  Lanes result{};
  shardopt::store_pack(result.data(), math::fma(2.0f, x, math::mul(x, 3.0f)));
  return result;
}

}  // namespace

TEST_CASE("Numbers and packs mix", "[core][math][host]") {
  const Lanes result = mixed({1, 2, 3, 4, 5, 6, 7, 8});
  for (std::size_t i = 0; i < lanes; ++i) REQUIRE(result[i] == 5.0f * static_cast<float>(i + 1));
}

#endif
