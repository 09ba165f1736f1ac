// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/parameter_table.hpp>
#include <shardopt/core/tile.hpp>
#include <shardopt/zero/buffers.hpp>
#include <shardopt/zero/memory_plan.hpp>
#include <shardopt/zero/memory_ranges.hpp>
#include <shardopt/zero/shard_layout.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace shardopt::inline v0::detail {

/// A run of tiles in the device's map.
struct TileRun {
  const Tile* tiles = nullptr;
  std::int64_t count = 0;
};

/// The tiles of one bucket on one rank.
struct BucketTiles {
  TileRun reduced;  ///< own slices, for the norm
  TileRun updated;  ///< what this rank updates: own slices, or everything
  TileRun
      staged;  ///< all segments with their place in staging; empty where the bucket is communicated in place
  TileRun staged_own;  ///< the part of `staged` that this rank owns
};

/// Tiles that a rank's map holds: what must be allocated.
[[nodiscard]] inline std::int64_t map_tiles(const ShardLayout& layout) {
  std::int64_t sum = 0;
  for (const Bucket& bucket : layout.buckets()) {
    const auto own = bucket.owned_by(layout.rank());
    sum += tiles_in(own);
    if (layout.updates_everything()) sum += tiles_in(bucket.segments);
    if (!bucket.in_place) sum += tiles_in(bucket.segments);
  }
  return sum;
}

/// The engine's buffers seen through the table: where each run of a parameter lies.
template <class Param, class Grad>
class EngineBuffers {
 public:
  EngineBuffers(const ParameterTable& table, FlatBuffers<Param, Grad> flat) : table_(&table), flat_(flat) {
    if (table.separate()) {
      throw std::invalid_argument(
          "shardopt: the table's parameters have addresses of their own: pass SeparateBuffers, not "
          "FlatBuffers");
    }
    require_aligned(flat.parameters, "parameters", alignof(Param));
    require_aligned(flat.gradients, "gradients", alignof(Grad));
    // Frozen parameters are read, too: they are compared or sent at the start.
    const bool reads = std::any_of(table.entries().begin(), table.entries().end(),
                                   [](const auto& entry) { return entry.numel > 0; });
    if ((reads && flat.parameters == nullptr) ||
        (table.trainable_elements() > 0 && flat.gradients == nullptr)) {
      throw std::invalid_argument("shardopt: FlatBuffers holds a null pointer");
    }
  }

  EngineBuffers(const ParameterTable& table, SeparateBuffers<Param, Grad>)
      : table_(&table), flat_{nullptr, nullptr} {
    if (!table.separate() && table.size() > 0) {
      throw std::invalid_argument(
          "shardopt: the table's parameters have offsets: pass FlatBuffers, not SeparateBuffers");
    }
    for (const auto& entry : table.entries()) {
      if (entry.alias_of || entry.numel == 0) continue;
      require_aligned(entry.parameter, "parameter " + detail::in_quotes(entry.name), alignof(Param));
      if (entry.frozen) continue;
      require_aligned(entry.gradient, "gradient of " + detail::in_quotes(entry.name), alignof(Grad));
    }
  }

  /// Adds the memory of all parameters and gradients, gaps left out.
  void add_to(MemoryRanges& ranges) const {
    for (std::uint32_t k = 0; k < table_->size(); ++k) {
      const auto& entry = table_->entries()[k];
      if (entry.alias_of || entry.numel == 0) continue;
      ranges.add(parameter(k), entry.numel * static_cast<std::int64_t>(sizeof(Param)), "parameter",
                 entry.name);
      if (!entry.frozen)
        ranges.add(gradient(k), entry.numel * static_cast<std::int64_t>(sizeof(Grad)), "gradient of",
                   entry.name);
    }
  }

  /// The memory of a table entry.
  [[nodiscard]] Param* parameter(std::uint32_t entry) const noexcept {
    const auto& e = table_->entries()[entry];
    return table_->separate() ? static_cast<Param*>(e.parameter) : flat_.parameters + e.offset;
  }
  [[nodiscard]] Grad* gradient(std::uint32_t entry) const noexcept {
    const auto& e = table_->entries()[entry];
    return table_->separate() ? static_cast<Grad*>(e.gradient) : flat_.gradients + e.offset;
  }

  /// The memory of a segment's first element.
  [[nodiscard]] Param* parameter(const Segment& segment) const noexcept {
    return parameter(segment.entry) + (segment.flat.begin - table_->entries()[segment.entry].flat.begin);
  }
  [[nodiscard]] Grad* gradient(const Segment& segment) const noexcept {
    return gradient(segment.entry) + (segment.flat.begin - table_->entries()[segment.entry].flat.begin);
  }

 private:
  static void require_aligned(const void* address, const std::string& what, std::size_t alignment) {
    if (reinterpret_cast<std::uintptr_t>(address) % alignment == 0) return;
    throw std::invalid_argument("shardopt: the address of the " + what +
                                " is not a multiple of its element size, " + std::to_string(alignment) +
                                " bytes");
  }

  const ParameterTable* table_;
  FlatBuffers<Param, Grad> flat_;
};

/// The engine's buffers of the precision's types, or of the engine's own types of the same kind.
/// @throws std::invalid_argument as EngineBuffers does
template <class Param, class Grad, template <class, class> class Buffers, class P, class G>
requires BufferKind<Buffers<P, G>>
[[nodiscard]] EngineBuffers<Param, Grad> engine_buffers(const ParameterTable& table,
                                                        const Buffers<P, G>& given) {
  static_assert(dtype_of<P> == dtype_of<Param> && dtype_of<G> == dtype_of<Grad>,
                "shardopt: the buffers' element types are not those of the precision policy");
  if constexpr (requires { given.parameters; }) {
    return {table, FlatBuffers<Param, Grad>{reinterpret_cast<Param*>(given.parameters),
                                            reinterpret_cast<Grad*>(given.gradients)}};
  } else {
    return {table, SeparateBuffers<Param, Grad>{}};
  }
}

/// The same, apart from whatever memory the engine gives the optimizer.
/// @param memory  as ZeroOptimizer takes it
/// @throws std::invalid_argument as EngineBuffers does, and naming what overlaps what
template <class Param, class Grad, class Buffers, class Memory>
[[nodiscard]] EngineBuffers<Param, Grad> engine_buffers(const ParameterTable& table, const Buffers& given,
                                                        const MemoryPlan& plan, const Memory& memory) {
  const auto result = engine_buffers<Param, Grad>(table, given);
  MemoryRanges ranges;
  result.add_to(ranges);
  const auto add_arena = [&](const Arena& arena) {
    if (arena.device != nullptr) ranges.add(arena.device, plan.device_bytes, "Arena.device", {});
    if (arena.pinned != nullptr) ranges.add(arena.pinned, plan.pinned_bytes, "Arena.pinned", {});
  };
  if (const Arena* arena = std::get_if<Arena>(&memory)) add_arena(*arena);
  if (const StateBuffers* states = std::get_if<StateBuffers>(&memory)) {
    add_arena(states->scratch);
    for (const auto& [name, pointer] : states->buffers) {
      if (pointer == nullptr) continue;
      ranges.add(pointer, plan.owned_parameters * static_cast<std::int64_t>(sizeof(float)), "state", name);
    }
  }
  ranges.require_disjoint();
  return result;
}

/// Builds a rank's map of tiles on the host, as it stands on the device at `base`.
template <class Param, class Grad>
[[nodiscard]] std::vector<BucketTiles> build_tiles(const ShardLayout& layout,
                                                   const EngineBuffers<Param, Grad>& buffers,
                                                   const Tile* base, std::vector<Tile>& map) {
  map.reserve(static_cast<std::size_t>(map_tiles(layout)));
  const auto append = [&](const Segment& segment, std::int64_t state) {
    append_tiles(segment, buffers.parameter(segment), buffers.gradient(segment), state, map);
  };
  const auto run_from = [&](std::size_t begin) {
    return TileRun{base + begin, static_cast<std::int64_t>(map.size() - begin)};
  };
  std::vector<BucketTiles> result;
  for (const Bucket& bucket : layout.buckets()) {
    BucketTiles tiles;
    const std::int64_t own_block = bucket.blocks().block(layout.rank()).begin;
    std::size_t begin = map.size();
    for (const Segment& s : bucket.owned_by(layout.rank())) append(s, bucket.state + s.block - own_block);
    tiles.reduced = run_from(begin);
    tiles.updated = tiles.reduced;
    if (layout.updates_everything()) {
      begin = map.size();
      for (const Segment& s : layout.updated(bucket)) append(s, s.flat.begin);
      tiles.updated = run_from(begin);
    }
    if (!bucket.in_place) {
      begin = map.size();
      for (const Segment& s : bucket.segments) {
        const std::size_t segment_begin = map.size();
        append(s, s.block);
        if (s.owner != layout.rank()) continue;
        if (tiles.staged_own.count == 0) tiles.staged_own.tiles = base + segment_begin;
        tiles.staged_own.count += static_cast<std::int64_t>(map.size() - segment_begin);
      }
      tiles.staged = run_from(begin);
    }
    result.push_back(tiles);
  }
  return result;
}

}  // namespace shardopt::inline v0::detail
