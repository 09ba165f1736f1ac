// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/dtype.hpp>

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

namespace shardopt::inline v0 {

/// The engine's two flat buffers; parameters stand at their table offsets in both. Any element-aligned
/// address.
template <class Param, class Grad>
struct FlatBuffers {
  Param* parameters;  ///< device memory of the collective's device
  Grad* gradients;    ///< likewise; must not overlap the parameters
};
/// Clang deduces the arguments of an aggregate only by a guide.
template <class Param, class Grad>
FlatBuffers(Param*, Grad*) -> FlatBuffers<Param, Grad>;

/// Says that the table holds the addresses: every parameter has memory of its own. Buckets go through
/// staging.
template <class Param, class Grad>
struct SeparateBuffers {};

namespace detail {

template <class T>
inline constexpr bool is_buffer_kind = false;
template <class Param, class Grad>
inline constexpr bool is_buffer_kind<FlatBuffers<Param, Grad>> = true;
template <class Param, class Grad>
inline constexpr bool is_buffer_kind<SeparateBuffers<Param, Grad>> = true;

/// What an engine passes as its buffers, of whatever element types.
template <class T>
concept BufferKind = is_buffer_kind<T>;

}  // namespace detail

/// Memory the engine gives for all that the library keeps: `plan.device_bytes` and `plan.pinned_bytes`, both
/// aligned to 256 bytes. Must outlive the optimizer.
struct Arena {
  /// Device memory: `plan.device_bytes`.
  void* device = nullptr;
  /// Page-locked host memory that the device can write: `plan.pinned_bytes`.
  void* pinned = nullptr;
};

/// State buffers of the engine's, adopted as they are: by state name, and "master"; each with
/// `plan.owned_parameters` fp32 elements in shard order (flat order without gaps), any memory the device can
/// reach, aligned to 4 bytes.
struct StateBuffers {
  /// Name and address of each.
  std::vector<std::pair<std::string, float*>> buffers = {};
  /// Zero the states and copy the masters from the parameters; false: as they stand. Counters begin at 0
  /// either way: for states that have seen updates, set_counters() says how many.
  bool initialize = true;
  Arena scratch =
      {};  ///< for the rest (`plan.device_bytes` with adopted states); empty: the library allocates it

  StateBuffers() = default;
  /// From pairs of name and address.
  StateBuffers(std::initializer_list<std::pair<std::string, float*>> list) : buffers(list) {}
};

}  // namespace shardopt::inline v0
