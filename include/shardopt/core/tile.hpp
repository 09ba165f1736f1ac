// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/range.hpp>

#include <cstdint>

namespace shardopt::inline v0 {

/// Largest number of elements in a tile: the work of one thread block.
inline constexpr std::int64_t tile_elements = 8 * grain_elements;

/// One of the two buffers that a tile is a run of.
enum class TileField : std::uint8_t { parameter, gradient };

/// A run of one parameter's elements in one group, cut at multiples of tile_elements of the flat index: what
/// a kernel needs to know to work on it. Kernels are launched over a bucket's tiles, never per parameter.
struct Tile {
  void* parameter;  ///< first element
  void* gradient;   ///< first element
  std::int64_t
      state;  ///< first element's index in the rank's state buffers; in a staging map, in the staging buffer
  std::uint32_t count;  ///< elements, 1 .. tile_elements
  std::uint16_t group;  ///< index of its group
  std::uint16_t phase;  ///< flat index of the first element modulo grain_elements: where in a grain it begins

  /// Its first element in one of the buffers.
  [[nodiscard]] SHARDOPT_HD constexpr void* address(TileField field) const noexcept {
    return field == TileField::parameter ? parameter : gradient;
  }

  /// Elements up to the end of the first grain.
  [[nodiscard]] SHARDOPT_HD constexpr std::uint32_t first_grain() const noexcept {
    const auto rest = static_cast<std::uint32_t>(grain_elements) - phase;
    return rest < count ? rest : count;
  }
};
static_assert(sizeof(Tile) == 32, "read by kernels as two 16-byte words");

}  // namespace shardopt::inline v0
