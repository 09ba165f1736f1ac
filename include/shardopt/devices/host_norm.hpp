// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/convert.hpp>
#include <shardopt/core/exact_sum.hpp>
#include <shardopt/core/float_environment.hpp>
#include <shardopt/core/math.hpp>
#include <shardopt/core/tile.hpp>

#include <cstdint>

namespace shardopt::inline v0::detail {

/// Width of the fixed order of summation inside a grain: element i is added to partial sum i mod 32 in
/// ascending order, then the partial sums pairwise, 16 apart, 8, 4, 2, 1. On a device it is a warp.
inline constexpr int grain_lanes = 32;

/// Sum of squares of one grain in that order, non-finite elements left out and counted. Squares of floats are
/// exact in double.
template <class Grad>
[[nodiscard]] double grain_squares(const Grad* gradient, std::uint32_t count,
                                   std::int64_t& non_finite) noexcept {
  double partial[grain_lanes] = {};
  for (std::uint32_t i = 0; i < count; ++i) {
    const float value = to_float(gradient[i]);
    if (!math::is_finite(value)) {
      ++non_finite;
      continue;
    }
    const double wide = math::widen(value);
    double& sum = partial[i % grain_lanes];
    sum = math::add(sum, math::mul(wide, wide));
  }
  for (int apart = grain_lanes / 2; apart > 0; apart /= 2) {
    for (int lane = 0; lane < apart; ++lane) partial[lane] = math::add(partial[lane], partial[lane + apart]);
  }
  return partial[0];
}

/// Adds the squares of a bucket's tiles to the limbs of an exact sum, and counts what is not finite.
template <class Grad>
void add_squares_on_host(const Tile* tiles, std::int64_t tile_count, std::int64_t* limbs,
                         std::int64_t* non_finite) noexcept {
  const FloatEnvironment environment;
  for (std::int64_t k = 0; k < tile_count; ++k) {
    const Tile& tile = tiles[k];
    const auto* gradient = static_cast<const Grad*>(tile.gradient);
    std::uint32_t count = tile.first_grain();
    for (std::uint32_t at = 0; at < tile.count;) {
      const exact_sum::Addend addend =
          exact_sum::Squares::split(grain_squares(gradient + at, count, *non_finite));
      for (int part = 0; part < 3; ++part) limbs[addend.first + part] += addend.parts[part];
      at += count;
      count = tile.count - at < grain_elements ? tile.count - at : static_cast<std::uint32_t>(grain_elements);
    }
  }
}

}  // namespace shardopt::inline v0::detail
