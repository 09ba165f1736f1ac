// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/dtype.hpp>
#include <shardopt/core/parameter_table.hpp>
#include <shardopt/core/range.hpp>
#include <shardopt/zero/bucket_buffers.hpp>
#include <shardopt/zero/shard_layout.hpp>

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace shardopt::inline v0 {

/// A run of one state of one parameter, where a rank keeps it.
struct StateRun {
  /// "exp_avg", …; "master" is the fp32 value of the parameter: the master, or the fp32 parameter itself.
  std::string_view state;
  std::string_view parameter;  ///< its name
  Range range;                 ///< elements of the parameter
  float* data;                 ///< device memory of the first of them
};

/// A whole state of one parameter, in host memory.
struct FullState {
  std::string_view state;      ///< as in StateRun
  std::string_view parameter;  ///< its name
  std::vector<float> values;   ///< all elements of the parameter
};

namespace detail {

/// Which runs of state are meant.
enum class StateCover : bool {
  kept,      ///< all that this rank keeps
  disjoint,  ///< those that it alone speaks for: over the ranks, each element once
};

/// The runs of one state in flat order; neighbours in parameter and memory joined. The names are the table's.
/// @param base  the state buffer, or null: the state is the fp32 parameter itself
template <class Param, class Grad>
void append_state_runs(const ShardLayout& layout, const ParameterTable& table,
                       const EngineBuffers<Param, Grad>& buffers, std::string_view state, float* base,
                       StateCover cover, std::vector<StateRun>& runs) {
  const std::size_t first = runs.size();
  for (const Bucket& bucket : layout.buckets()) {
    const std::int64_t own_block = bucket.blocks().block(layout.rank()).begin;
    for (const Segment& segment : layout.updated(bucket)) {
      if (cover == StateCover::disjoint && segment.owner != layout.rank()) continue;
      const auto& entry = table.entries()[segment.entry];
      float* data = nullptr;
      if (base != nullptr) {
        data = base +
               (layout.updates_everything() ? segment.flat.begin : bucket.state + segment.block - own_block);
      } else if constexpr (dtype_of<Param> == Dtype::fp32) {
        data = reinterpret_cast<float*>(buffers.parameter(segment));
      }
      const Range range{segment.flat.begin - entry.flat.begin, segment.flat.end - entry.flat.begin};
      if (runs.size() > first) {
        StateRun& last = runs.back();
        if (last.parameter.data() == entry.name.data() && last.range.end == range.begin &&
            last.data + last.range.size() == data) {
          last.range.end = range.end;
          continue;
        }
      }
      runs.push_back({state, entry.name, range, data});
    }
  }
}

}  // namespace detail
}  // namespace shardopt::inline v0
