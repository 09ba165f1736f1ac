// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/range.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace shardopt::inline v0 {

/// Bytes one rank needs, known before anything is allocated.
///
/// `device_bytes` and `pinned_bytes` are what the library asks its allocator for, to the byte, or what an
/// Arena must hold. What the communication library and the CUDA context take is not counted.
struct MemoryPlan {
  /// A per-element buffer of this rank: a state of the rule, or "master".
  struct Buffer {
    /// State's name, or "master".
    std::string name = {};
    std::int64_t offset_bytes = 0;  ///< in the arena
    /// Of this rank's share.
    std::int64_t bytes = 0;
  };

  /// Whose plan this is.
  int rank = 0;
  /// Of how many ranks.
  int world = 1;
  std::int64_t parameters = 0;        ///< trainable elements
  std::int64_t owned_parameters = 0;  ///< elements that this rank keeps state for
  std::vector<Buffer> buffers = {};   ///< states and master, each with owned_parameters elements of 4 bytes

  std::int64_t state_bytes = 0;            ///< of the rule's states
  std::int64_t master_bytes = 0;           ///< of fp32 masters
  std::int64_t unsharded_state_bytes = 0;  ///< states and masters if every rank kept all
  std::int64_t staging_bytes = 0;          ///< one bucket in block order, where buckets are not contiguous
  std::int64_t workspace_bytes = 0;        ///< of the collective, for one bucket
  std::int64_t map_bytes = 0;              ///< tiles
  std::int64_t control_bytes = 0;          ///< counters, hyper-parameters, scratch of the start

  std::int64_t parameter_bytes = 0;  ///< of the engine's own trainable parameters, for comparison
  std::int64_t gradient_bytes = 0;   ///< of the engine's own gradients

  std::int64_t device_bytes = 0;  ///< all the library asks for, alignment included
  std::int64_t pinned_bytes = 0;  ///< page-locked host memory: tickets

  /// Bytes of this rank in all that grow with the model: parameters, gradients, states, masters.
  [[nodiscard]] std::int64_t model_bytes() const noexcept {
    return parameter_bytes + gradient_bytes + state_bytes + master_bytes;
  }
  /// The same if the optimizer were not sharded.
  [[nodiscard]] std::int64_t unsharded_model_bytes() const noexcept {
    return parameter_bytes + gradient_bytes + unsharded_state_bytes;
  }
};

namespace detail {

/// Alignment of every part of an arena, and of the arena: what cudaMalloc gives.
inline constexpr std::int64_t arena_alignment = 256;

/// Lays parts one after another. The sum of what was reserved is what must be allocated.
class ArenaCursor {
 public:
  /// Reserves `bytes` and gives their offset.
  std::int64_t reserve(std::int64_t bytes) noexcept {
    const std::int64_t at = end_;
    end_ += round_up(bytes, arena_alignment);
    return at;
  }
  [[nodiscard]] std::int64_t end() const noexcept { return end_; }

 private:
  std::int64_t end_ = 0;
};

}  // namespace detail
}  // namespace shardopt::inline v0
