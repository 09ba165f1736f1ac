// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/dtype.hpp>
#include <shardopt/core/range.hpp>
#include <shardopt/core/rank_tree.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace shardopt::inline v0 {

/// The order in which gradients of several ranks are added.
enum class Reduction : std::uint8_t {
  automatic,  ///< the collective's default for the gradient type
  native,     ///< the communication library's own: same configuration, same bits
  ordered,    ///< once, in fp32, by a fixed tree over the rank index: bits depend on the gradients alone
};

/// Ranks that an ordered reduction can have.
inline constexpr int most_ordered_ranks = (1 << detail::device_rank_levels) - 1;

/// The name as it stands in messages.
[[nodiscard]] constexpr std::string_view name_of(Reduction reduction) noexcept {
  switch (reduction) {
    case Reduction::automatic:
      return "automatic";
    case Reduction::native:
      return "native";
    case Reduction::ordered:
      return "ordered";
  }
  return "unknown";
}

/// A contiguous buffer cut into one block a rank, in rank order, without gaps; blocks may be empty or
/// unequal.
struct BlockLayout {
  std::span<const std::int64_t> borders;  ///< world + 1 element offsets, ascending, borders[0] == 0

  /// Number of blocks.
  [[nodiscard]] int world() const noexcept { return static_cast<int>(borders.size()) - 1; }
  /// Elements of all blocks.
  [[nodiscard]] std::int64_t elements() const noexcept { return borders.back(); }
  /// Elements of a rank's block.
  [[nodiscard]] Range block(int rank) const noexcept {
    const auto r = static_cast<std::size_t>(rank);
    return {borders[r], borders[r + 1]};
  }

  /// Whether all blocks are of one size.
  [[nodiscard]] bool uniform() const noexcept {
    for (int rank = 1; rank < world(); ++rank) {
      if (block(rank).size() != block(0).size()) return false;
    }
    return true;
  }
};

/// How ranks talk. Every rank makes the same calls with the same arguments in the same order; each call is
/// collective.
///
/// The calls enqueue on `stream()` of the model's Device and do not wait, `exchange` apart. Counts are
/// elements. A move-only owner, or a view of what the engine owns.
///  - `reduce_scatter`: afterwards block `rank()` of `base` holds the sum over ranks, rounded once where the
///  order is
///    `ordered`; the other blocks are unspecified. `workspace` has `workspace_bytes` bytes: a pure function,
///    so that memory can be planned without a device.
///  - `all_gather`: block r of `base` becomes rank r's on every rank.
///  - `all_reduce`: sums of 64-bit integers, exact, modulo 2^64.
///  - `exchange`: host bytes of every rank to every rank; waits. `scratch` has world · bytes bytes of device
///  memory.
///
/// A model may have more, which is used where it is there:
///  - `static constexpr bool capturable`: false if calls cannot be part of a CUDA graph. Then captures are
///    refused before anything is enqueued.
///  - `label(text)`: what the next calls belong to, for reports; takes a std::string, or whatever converts to
///    one.
///  - `abort(std::string_view)`: this rank goes no further; the others must not wait for it.
///  - `throw_if_failed()`: throws if the collective has failed already. Called before a call has effects.
///  - `waiter()`: a std::function that waits on the host for an event of the device, and throws a
///    CollectiveError if the collective fails meanwhile; may outlive the model.
///  - `stuck()`: whether work on the device may wait for a lost peer for ever. Memory is then not freed.
template <class Model>
concept Collective = std::movable<Model> &&
    requires(Model comm, const Model view, void* base, BlockLayout blocks, Dtype type, Reduction reduction,
             std::int64_t* values, std::int64_t count, int root, std::span<const std::byte> mine,
             std::span<std::byte> all) {
  typename Model::Device;
  { Model::name } -> std::convertible_to<std::string_view>;
  { view.rank() } -> std::same_as<int>;
  { view.world() } -> std::same_as<int>;
  { view.stream() } -> std::same_as<typename Model::Device::Stream>;
  { view.device() } -> std::convertible_to<const typename Model::Device&>;
  { Model::supports(reduction, type) } -> std::same_as<bool>;
  { Model::automatic_reduction(type) } -> std::same_as<Reduction>;
  { Model::workspace_bytes(reduction, blocks, type, root) } -> std::same_as<std::int64_t>;
  comm.reduce_scatter(base, blocks, type, reduction, base);
  comm.all_gather(base, blocks, type);
  comm.all_reduce(values, count);
  comm.broadcast(base, count, root);
  comm.exchange(mine, all, base);
};

}  // namespace shardopt::inline v0
