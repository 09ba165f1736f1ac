// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/collective.hpp>
#include <shardopt/core/tile.hpp>
#include <shardopt/rules/rule.hpp>
#include <shardopt/zero/bucket_buffers.hpp>
#include <shardopt/zero/handshake.hpp>
#include <shardopt/zero/memory_plan.hpp>
#include <shardopt/zero/shard_layout.hpp>
#include <shardopt/zero/step_state.hpp>
#include <shardopt/zero/ticket.hpp>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

namespace shardopt::inline v0::detail {

/// Offsets in the arena of all that one optimizer keeps.
struct ArenaOffsets {
  std::int64_t state = 0;      ///< StepState
  std::int64_t rules = 0;      ///< one a group
  std::int64_t constants = 0;  ///< one a group
  std::int64_t scratch = 0;    ///< messages of the start
  std::int64_t map = 0;        ///< tiles
  std::int64_t staging = 0;    ///< one bucket of the wider of both element types
  std::int64_t workspace = 0;  ///< the collective's
};

struct PlannedMemory {
  MemoryPlan plan;
  ArenaOffsets offsets;
};

/// Room for the buffers of states and masters, or only their sizes where they are the engine's own.
template <OptimizerRule Rule, PrecisionPolicy Precision>
void plan_buffers(MemoryPlan& plan, ArenaCursor& arena, bool stateful, bool adopted) {
  const auto add = [&](std::string name) {
    const std::int64_t size = plan.owned_parameters * static_cast<std::int64_t>(sizeof(float));
    plan.buffers.push_back(
        {.name = std::move(name), .offset_bytes = adopted ? -1 : arena.reserve(size), .bytes = size});
    return size;
  };
  if (stateful) {
    for (const auto state : state_names<Rule>) plan.state_bytes += add(std::string(state));
  }
  if (Precision::has_master) plan.master_bytes = add("master");
  plan.unsharded_state_bytes = static_cast<std::int64_t>(plan.buffers.size()) * plan.parameters *
                               static_cast<std::int64_t>(sizeof(float));
}

/// Room for what the largest bucket needs while it travels.
template <Collective Comm, PrecisionPolicy Precision>
void plan_buckets(const ShardLayout& layout, Reduction reduction, PlannedMemory& result, ArenaCursor& arena) {
  using Grad = typename Precision::Grad;
  constexpr auto widest =
      static_cast<std::int64_t>((std::max)(sizeof(typename Precision::Param), sizeof(Grad)));
  MemoryPlan& plan = result.plan;
  for (const Bucket& bucket : layout.buckets()) {
    if (!bucket.in_place) plan.staging_bytes = (std::max)(plan.staging_bytes, bucket.flat.size() * widest);
    plan.workspace_bytes =
        (std::max)(plan.workspace_bytes,
                   Comm::workspace_bytes(reduction, bucket.blocks(), dtype_of<Grad>, layout.rank()));
  }
  result.offsets.staging = arena.reserve(plan.staging_bytes);
  result.offsets.workspace = arena.reserve(plan.workspace_bytes);
}

/// A pure function of its arguments: needs no device.
/// @param stateful  whether the rule's states are kept
/// @param adopted  whether states and masters are the engine's own buffers
template <OptimizerRule Rule, Collective Comm, PrecisionPolicy Precision>
[[nodiscard]] PlannedMemory plan_memory(const ShardLayout& layout, std::size_t groups, Reduction reduction,
                                        bool stateful, bool adopted) {
  constexpr auto bytes = [](auto size) { return static_cast<std::int64_t>(size); };
  constexpr std::int64_t param_bytes = sizeof(typename Precision::Param);
  constexpr std::int64_t grad_bytes = sizeof(typename Precision::Grad);
  const auto group_count = static_cast<std::int64_t>(groups);
  PlannedMemory result;
  MemoryPlan& plan = result.plan;
  ArenaCursor arena;

  plan.rank = layout.rank();
  plan.world = layout.world();
  plan.parameters = layout.elements();
  plan.owned_parameters = layout.updated_elements();
  plan.parameter_bytes = plan.parameters * param_bytes;
  plan.gradient_bytes = plan.parameters * grad_bytes;

  result.offsets.state = arena.reserve(bytes(sizeof(StepState)));
  result.offsets.rules = arena.reserve(group_count * bytes(sizeof(Rule)));
  result.offsets.constants = arena.reserve(group_count * bytes(sizeof(typename Rule::Constants)));
  result.offsets.scratch = arena.reserve(plan.world * handshake_bytes);
  plan.control_bytes = arena.end();
  plan.map_bytes = map_tiles(layout) * bytes(sizeof(Tile));
  result.offsets.map = arena.reserve(plan.map_bytes);

  plan_buffers<Rule, Precision>(plan, arena, stateful, adopted);
  plan_buckets<Comm, Precision>(layout, reduction, result, arena);
  plan.device_bytes = arena.end();
  plan.pinned_bytes = TicketRing<typename Comm::Device>::pinned_bytes;
  return result;
}

}  // namespace shardopt::inline v0::detail
