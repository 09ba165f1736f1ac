// SPDX-License-Identifier: Apache-2.0
#include <shardopt/devices/cuda.cuh>

#include <shardopt/core/exact_sum.hpp>
#include <shardopt/devices/host.hpp>
#include <support/cuda_ranks.hpp>
#include <support/numbers.hpp>
#include <support/require_devices.hpp>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

using namespace test;

namespace {

constexpr std::size_t words = so::exact_sum::Squares::limbs + 1;  // and the number of non-finite elements
constexpr std::size_t buffer_size = 4 * 2048 + 16;

/// Of many magnitudes, so that another order of a sum within a grain is another sum.
template <class T>
std::vector<T> gradients(bool specials) {
  std::vector<T> result;
  for (std::size_t k = 0; k < buffer_size; ++k) {
    const std::uint64_t draw = noise(7, k);
    const double scale = 1.0 / static_cast<double>(std::uint64_t{1} << (draw >> 40) % 30);
    result.push_back(rounded<T>((static_cast<double>(draw % 2000001) * 1e-6 - 1.0) * scale));
  }
  if (!specials) return result;
  using limits = std::numeric_limits<float>;
  const float special[] = {limits::infinity(), -limits::infinity(), limits::quiet_NaN()};
  for (std::size_t k = 0; k < 11; ++k) result[(k * 733 + 5) % buffer_size] = so::from_float<T>(special[k % 3]);
  return result;
}

/// Whole tiles, and short ones that begin within a grain.
std::vector<so::Tile> tiles_over(void* gradient, std::size_t element_bytes) {
  struct Run {
    std::size_t begin;
    std::uint32_t count;
    std::uint16_t phase;
  };
  constexpr Run runs[] = {{0, 2048, 0},   {2048, 2047, 0},   {4099, 1, 255}, {4102, 300, 200},
                          {4404, 256, 0}, {4660, 1500, 101}, {6160, 33, 0},  {6194, 1998, 2}};
  std::vector<so::Tile> tiles;
  for (const Run& run : runs)
    tiles.push_back({.parameter = nullptr,
                     .gradient = static_cast<std::byte*>(gradient) + run.begin * element_bytes,
                     .state = 0,
                     .count = run.count,
                     .group = 0,
                     .phase = run.phase});
  return tiles;
}

}  // namespace

TEMPLATE_TEST_CASE("The sum of squares on a GPU has the host's limbs and its number of non-finite elements",
                   "[devices][cuda]", float, so::bf16, so::fp16) {
  const bool specials = GENERATE(false, true);
  const std::size_t slip = GENERATE(0U, 1U, 2U, 3U);
  CAPTURE(specials, slip);
  require_devices(1);
  const OwnStream stream;
  std::vector<TestType> values = gradients<TestType>(specials);
  const OwnMemory<TestType> device_values(values.size());
  device_values.write(values, stream);

  std::vector<std::int64_t> expected(words, 0);
  const auto tiles = tiles_over(values.data() + slip, sizeof(TestType));
  const auto count = static_cast<std::int64_t>(tiles.size());
  so::Host{}.add_squares<TestType>(tiles.data(), count, expected.data(), &expected.back(), {});
  CHECK((expected.back() != 0) == specials);

  const OwnMemory<so::Tile> device_tiles(tiles.size());
  device_tiles.write(tiles_over(device_values.data() + slip, sizeof(TestType)), stream);
  const OwnMemory<std::int64_t> sums(words);
  sums.write(std::vector<std::int64_t>(words, 0), stream);
  so::Cuda(0).add_squares<TestType>(device_tiles.data(), count, sums.data(), sums.data() + words - 1, stream);
  CHECK(sums.read(stream) == expected);
}
