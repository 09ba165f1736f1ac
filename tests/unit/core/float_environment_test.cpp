// SPDX-License-Identifier: Apache-2.0
#include <shardopt/core/float_environment.hpp>
//
#include <shardopt/core/math.hpp>

#include <catch2/catch_test_macros.hpp>
#include <limits>

#if SHARDOPT_HOST_AVX2
#include <immintrin.h>

namespace {

// Through memory, so that nothing is computed before the mode is set.
volatile float tiny = std::numeric_limits<float>::denorm_min();
volatile float numerator = 1.0f;
volatile float three = 3.0f;

float third() { return shardopt::math::div(numerator, three); }
float twice_tiny() { return shardopt::math::add(tiny, tiny); }

}  // namespace

TEST_CASE("The guard gives IEEE arithmetic whatever was set, and puts it back", "[core][math][host]") {
  const float expected = third();
  const unsigned before = _mm_getcsr();
  constexpr unsigned flush_and_zero = 0x8040;
  constexpr unsigned round_down = 0x2000;
  _mm_setcsr(before | flush_and_zero | round_down);
  const unsigned set = _mm_getcsr();
  const float flushed = twice_tiny();
  const float rounded_down = third();
  float guarded_sum = 0.0f;
  float guarded_third = 0.0f;
  {
    const shardopt::FloatEnvironment environment;
    guarded_sum = twice_tiny();
    guarded_third = third();
  }
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  REQUIRE(flushed == 0.0f);  // the mode was in force: the test can fail
  REQUIRE(rounded_down < expected);
  REQUIRE(guarded_sum == 2.0f * tiny);
  REQUIRE(guarded_third == expected);
  REQUIRE((after & ~0x3fU) == (set & ~0x3fU));
}

TEST_CASE("Under the guard no exception traps", "[core][math][host]") {
  const unsigned before = _mm_getcsr();
  constexpr unsigned invalid_masked = 0x80;
  constexpr unsigned flags = 0x3f;
  _mm_setcsr(before & ~(invalid_masked | flags));
  float nan = 0.0f;
  {
    const shardopt::FloatEnvironment environment;
    nan = shardopt::math::sqrt(-numerator);
  }
  _mm_setcsr(before);
  REQUIRE(shardopt::math::is_nan(nan));
}

#endif
