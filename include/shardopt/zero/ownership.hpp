// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/parameter_table.hpp>
#include <shardopt/core/range.hpp>
#include <shardopt/zero/bucket_buffers.hpp>
#include <shardopt/zero/shard_layout.hpp>

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace shardopt::inline v0 {

/// A run of a parameter that a rank keeps state for.
struct OwnedPart {
  std::string_view name;  ///< of the parameter; valid while the optimizer lives
  Range range;            ///< elements of the parameter
};

namespace detail {

/// What a rank updates, in flat order; neighbours of one parameter joined. The names are the table's.
[[nodiscard]] inline std::vector<OwnedPart> owned_parts(const ShardLayout& layout,
                                                        const ParameterTable& table) {
  std::vector<OwnedPart> parts;
  for (const Bucket& bucket : layout.buckets()) {
    for (const Segment& segment : layout.updated(bucket)) {
      const auto& entry = table.entries()[segment.entry];
      const Range range{segment.flat.begin - entry.flat.begin, segment.flat.end - entry.flat.begin};
      if (!parts.empty() && parts.back().name.data() == entry.name.data() &&
          parts.back().range.end == range.begin) {
        parts.back().range.end = range.end;
      } else {
        parts.push_back({entry.name, range});
      }
    }
  }
  return parts;
}

/// Addresses and elements of the trainable parameters' gradients, neighbours in memory joined.
template <class Param, class Grad>
[[nodiscard]] std::vector<std::pair<Grad*, std::int64_t>> gradient_runs(
    const ParameterTable& table, const EngineBuffers<Param, Grad>& buffers) {
  std::vector<std::pair<Grad*, std::int64_t>> runs;
  for (std::uint32_t k = 0; k < table.size(); ++k) {
    const auto& entry = table.entries()[k];
    if (entry.flat.empty()) continue;
    Grad* gradient = buffers.gradient(k);
    if (!runs.empty() && runs.back().first + runs.back().second == gradient) {
      runs.back().second += entry.numel;
    } else {
      runs.emplace_back(gradient, entry.numel);
    }
  }
  return runs;
}

}  // namespace detail
}  // namespace shardopt::inline v0
