// SPDX-License-Identifier: Apache-2.0
#include <shardopt/core/pack_memory.hpp>
//
#include <shardopt/core/convert.hpp>

#include <array>
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>

#if SHARDOPT_HOST_AVX2

using shardopt::bf16;
using shardopt::fp16;

namespace {

template <class T>
SHARDOPT_TARGET_AVX2 void copy_first(T* to, const T* from, int count) {
  shardopt::store_pack(to, shardopt::load_pack(from, count), count);
}

template <class T>
SHARDOPT_TARGET_AVX2 void copy_eight(T* to, const T* from) {
  shardopt::store_pack(to, shardopt::load_pack(from));
}

template <class T>
SHARDOPT_TARGET_AVX2 std::array<float, 8> load_first(const T* from, int count) {
  std::array<float, 8> result{};
  shardopt::store_pack(result.data(), shardopt::load_pack(from, count));
  return result;
}

SHARDOPT_TARGET_AVX2 int non_finite(const std::array<float, 8>& values) {
  return shardopt::count_non_finite(shardopt::load_pack(values.data()));
}

}  // namespace

TEMPLATE_TEST_CASE("A partial pack reads and writes its first elements and nothing else",
                   "[core][pack][host]", float, bf16, fp16) {
  const int count = GENERATE(range(0, 9));
  CAPTURE(count);
  const auto size = static_cast<std::size_t>(count);
  // exactly as long as it may be: a sanitizer sees what is read beyond
  const auto from = std::make_unique<TestType[]>(size);
  for (std::size_t i = 0; i < size; ++i)
    from[i] = shardopt::from_float<TestType>(static_cast<float>(i) + 1.5f);
  const auto lanes = load_first(from.get(), count);
  for (std::size_t i = 0; i < 8; ++i) REQUIRE(lanes[i] == (i < size ? static_cast<float>(i) + 1.5f : 0.0f));

  std::array<TestType, 10> to{};
  to.fill(shardopt::from_float<TestType>(-7.0f));
  copy_first(to.data() + 1, from.get(), count);
  for (std::size_t i = 0; i < to.size(); ++i) {
    CAPTURE(i);
    const bool written = i >= 1 && i < size + 1;
    REQUIRE(shardopt::to_float(to[i]) == (written ? static_cast<float>(i) + 0.5f : -7.0f));
  }
}

TEMPLATE_TEST_CASE("Packs are read and written at any address of an element", "[core][pack][host][B008]",
                   float, bf16, fp16) {
  const std::size_t shift = GENERATE(0U, 1U, 2U, 3U, 5U);
  CAPTURE(shift);
  alignas(32) std::array<TestType, 16> from{};
  alignas(32) std::array<TestType, 16> to{};
  for (std::size_t i = 0; i < from.size(); ++i)
    from[i] = shardopt::from_float<TestType>(static_cast<float>(i));
  copy_eight(to.data() + shift, from.data() + shift);
  for (std::size_t i = 0; i < to.size(); ++i) {
    const bool written = i >= shift && i < shift + 8;
    REQUIRE(shardopt::to_float(to[i]) == (written ? static_cast<float>(i) : 0.0f));
  }
}

TEST_CASE("Infinities and NaNs of a pack are counted, the largest and smallest numbers are not",
          "[core][pack][host]") {
  constexpr float inf = std::numeric_limits<float>::infinity();
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  constexpr float big = (std::numeric_limits<float>::max)();
  constexpr float tiny = std::numeric_limits<float>::denorm_min();
  REQUIRE(non_finite({0, -0.0f, 1, big, -big, tiny, -tiny, 3}) == 0);
  REQUIRE(non_finite({0, inf, 1, 2, 3, 4, 5, 6}) == 1);
  REQUIRE(non_finite({nan, inf, -inf, -nan, 3, 4, 5, 6}) == 4);
  REQUIRE(non_finite({nan, inf, -inf, -nan, nan, nan, inf, std::bit_cast<float>(0x7f800001U)}) == 8);
}

#endif
