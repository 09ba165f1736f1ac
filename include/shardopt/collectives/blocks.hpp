// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/collective.hpp>
#include <shardopt/core/digest.hpp>
#include <shardopt/core/dtype.hpp>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace shardopt::inline v0::detail {

/// What ranks compare of a layout.
[[nodiscard]] inline std::uint64_t digest_of(BlockLayout blocks) noexcept {
  Digest digest;
  for (const std::int64_t border : blocks.borders) digest.add(static_cast<std::uint64_t>(border));
  return digest.value();
}

/// Bytes of elements.
[[nodiscard]] inline std::int64_t bytes_of(std::int64_t elements, Dtype type) noexcept {
  return elements * static_cast<std::int64_t>(size_of(type));
}

/// The address of an element of a buffer.
[[nodiscard]] inline void* element_of(void* base, std::int64_t element, Dtype type) noexcept {
  return static_cast<std::byte*>(base) + bytes_of(element, type);
}

/// @throws std::invalid_argument unless there is one block a rank
inline void require_block_a_rank(BlockLayout blocks, int world, std::string_view collective) {
  if (blocks.world() == world) return;
  throw std::invalid_argument("shardopt: " + std::string(collective) + ": a layout of " +
                              std::to_string(blocks.world()) + " blocks for a world of " +
                              std::to_string(world));
}

/// @throws std::invalid_argument unless `all` has room for what every rank gives
inline void require_room_for_all(std::size_t mine, std::size_t all, int world, std::string_view collective) {
  if (all >= mine * static_cast<std::size_t>(world)) return;
  throw std::invalid_argument("shardopt: " + std::string(collective) + ": exchange of " +
                              std::to_string(mine) + " bytes a rank in a world of " + std::to_string(world) +
                              " gives " + std::to_string(mine * static_cast<std::size_t>(world)) +
                              " bytes, there is room for " + std::to_string(all));
}

/// @throws std::invalid_argument for a rank outside the world
inline void require_rank(int rank, int world, std::string_view collective) {
  if (rank >= 0 && rank < world) return;
  throw std::invalid_argument("shardopt: " + std::string(collective) + ": rank " + std::to_string(rank) +
                              " of a world of " + std::to_string(world) + " does not exist");
}

}  // namespace shardopt::inline v0::detail
