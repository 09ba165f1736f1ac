// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/collective.hpp>
#include <shardopt/core/parameter_table.hpp>
#include <shardopt/core/tile.hpp>
#include <shardopt/sharding/shard_plan.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace shardopt::inline v0::detail {

/// A run of one parameter's elements that one rank owns.
struct Segment {
  Range flat = {};
  int owner = 0;
  std::uint32_t entry = 0;  ///< index in the table
  std::uint16_t group = 0;
  std::int64_t block = 0;  ///< first element's offset in the bucket's block order
};

/// A bucket cut into one block a rank: the unit of communication.
///
/// *Block order*: the elements by owner, then by flat index. Where that is the order in memory the bucket is
/// communicated in place; elsewhere through a staging buffer in block order.
struct Bucket {
  Range flat = {};
  std::vector<Segment> segments = {};      ///< in block order
  std::vector<std::int64_t> borders = {};  ///< of the blocks, world + 1
  bool in_place = false;
  std::int64_t state = 0;  ///< where this rank's slices begin in its state buffers

  [[nodiscard]] BlockLayout blocks() const noexcept { return {borders}; }
  [[nodiscard]] std::span<const Segment> owned_by(int rank) const noexcept {
    const auto first = std::lower_bound(segments.begin(), segments.end(), rank,
                                        [](const Segment& s, int owner) { return s.owner < owner; });
    const auto last = std::upper_bound(first, segments.end(), rank,
                                       [](int owner, const Segment& s) { return owner < s.owner; });
    return {first, last};
  }
};

/// Tiles that a run is cut into.
[[nodiscard]] constexpr std::int64_t tiles_in(Range flat) noexcept {
  return flat.empty() ? 0 : (flat.end - 1) / tile_elements - flat.begin / tile_elements + 1;
}

[[nodiscard]] inline std::int64_t tiles_in(std::span<const Segment> segments) noexcept {
  std::int64_t sum = 0;
  for (const Segment& segment : segments) sum += tiles_in(segment.flat);
  return sum;
}

/// The plan of one rank over one table: buckets with their segments and the place of the rank's state. Knows
/// no memory.
class ShardLayout {
 public:
  /// @param groups  names in the order of the configuration
  /// @throws std::invalid_argument for a parameter of an unknown group, a policy that breaks its contract, or
  /// more elements than can be planned
  template <class Policy>
  ShardLayout(const ParameterTable& table, const std::vector<std::string>& groups, const Policy& policy,
              int rank, int world, std::int64_t gradient_bytes)
      : rank_(rank),
        world_(world),
        elements_(table.trainable_elements()),
        updates_everything_(Policy::updates_everything) {
    require_plannable(elements_);
    std::vector<std::int64_t> begins;
    collect_parameters(table, groups, begins);
    const FlatSpace space{elements_, begins};
    plan_ = policy.plan(space, world, gradient_bytes);
    require_valid(space, plan_, world);
    build_buckets(table);
  }

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int world() const noexcept { return world_; }
  [[nodiscard]] std::int64_t elements() const noexcept { return elements_; }
  [[nodiscard]] bool updates_everything() const noexcept { return updates_everything_; }
  [[nodiscard]] const std::vector<Bucket>& buckets() const noexcept { return buckets_; }
  [[nodiscard]] const ShardPlan& plan() const noexcept { return plan_; }

  /// Elements that this rank keeps state for.
  [[nodiscard]] std::int64_t updated_elements() const noexcept {
    return updates_everything_ ? elements_ : plan_.reduced_elements(rank_);
  }

  /// The buckets that hold elements of a parameter: [first, last).
  [[nodiscard]] Range buckets_of(Range flat) const noexcept {
    if (flat.empty()) return {};
    const auto first = std::upper_bound(buckets_.begin(), buckets_.end(), flat.begin,
                                        [](std::int64_t at, const Bucket& b) { return at < b.flat.end; });
    const auto last = std::lower_bound(first, buckets_.end(), flat.end,
                                       [](const Bucket& b, std::int64_t at) { return b.flat.begin < at; });
    return {first - buckets_.begin(), last - buckets_.begin()};
  }

  /// The segments of a bucket in flat order that this rank updates.
  [[nodiscard]] std::vector<Segment> updated(const Bucket& bucket) const {
    const auto own = updates_everything_ ? std::span<const Segment>(bucket.segments) : bucket.owned_by(rank_);
    std::vector<Segment> result(own.begin(), own.end());
    std::sort(result.begin(), result.end(),
              [](const Segment& a, const Segment& b) { return a.flat.begin < b.flat.begin; });
    return result;
  }

 private:
  struct Placed {
    Range flat;
    std::uint32_t entry;
    std::uint16_t group;
  };

  void collect_parameters(const ParameterTable& table, const std::vector<std::string>& groups,
                          std::vector<std::int64_t>& begins) {
    std::map<std::string, std::uint16_t, std::less<>> group_index;
    for (std::size_t g = 0; g < groups.size(); ++g)
      group_index.emplace(groups[g], static_cast<std::uint16_t>(g));
    for (std::uint32_t k = 0; k < table.size(); ++k) {
      const ParameterTable::Entry& entry = table.entries()[k];
      if (entry.frozen || entry.alias_of) continue;
      const auto group = group_index.find(entry.group);
      if (group == group_index.end()) {
        std::string known;
        for (const std::string& name : groups) known += (known.empty() ? "" : ", ") + detail::in_quotes(name);
        throw std::invalid_argument("shardopt: parameter " + detail::in_quotes(entry.name) + " is in group " +
                                    detail::in_quotes(entry.group) + ", which config.groups lacks; it has " +
                                    (known.empty() ? "none" : known));
      }
      if (entry.numel == 0) continue;
      parameters_.push_back({entry.flat, k, group->second});
      begins.push_back(entry.flat.begin);
    }
  }

  void build_buckets(const ParameterTable& table) {
    std::size_t run = 0;
    std::size_t parameter = 0;
    std::int64_t state = 0;
    for (const Range flat : plan_.buckets) {
      Bucket bucket{.flat = flat};
      std::int64_t at = flat.begin;
      while (at < flat.end) {
        while (plan_.runs[run].flat.end <= at) ++run;
        while (parameters_[parameter].flat.end <= at) ++parameter;
        const Placed& placed = parameters_[parameter];
        const std::int64_t end = (std::min)({flat.end, plan_.runs[run].flat.end, placed.flat.end});
        bucket.segments.push_back({.flat = {at, end},
                                   .owner = plan_.runs[run].owner,
                                   .entry = placed.entry,
                                   .group = placed.group});
        at = end;
      }
      finish(bucket, table);
      bucket.state = updates_everything_ ? flat.begin : state;
      state += bucket.blocks().block(rank_).size();
      buckets_.push_back(std::move(bucket));
    }
  }

  void finish(Bucket& bucket, const ParameterTable& table) const {
    std::stable_sort(bucket.segments.begin(), bucket.segments.end(),
                     [](const Segment& a, const Segment& b) { return a.owner < b.owner; });
    bucket.borders.assign(static_cast<std::size_t>(world_) + 1, 0);
    std::int64_t block = 0;
    bucket.in_place = true;
    for (std::size_t k = 0; k < bucket.segments.size(); ++k) {
      Segment& segment = bucket.segments[k];
      segment.block = block;
      block += segment.flat.size();
      bucket.borders[static_cast<std::size_t>(segment.owner) + 1] = block;
      if (k > 0 && !adjacent(bucket.segments[k - 1], segment, table)) bucket.in_place = false;
    }
    for (std::size_t r = 1; r < bucket.borders.size(); ++r) {
      bucket.borders[r] = (std::max)(bucket.borders[r], bucket.borders[r - 1]);
    }
  }

  /// Whether b follows a in the engine's memory.
  [[nodiscard]] static bool adjacent(const Segment& a, const Segment& b, const ParameterTable& table) {
    const ParameterTable::Entry& first = table.entries()[a.entry];
    const ParameterTable::Entry& second = table.entries()[b.entry];
    if (a.entry == b.entry) return a.flat.end == b.flat.begin;
    if (table.separate()) return false;
    return first.offset + (a.flat.end - first.flat.begin) ==
           second.offset + (b.flat.begin - second.flat.begin);
  }

  int rank_;
  int world_;
  std::int64_t elements_;
  bool updates_everything_;
  std::vector<Placed> parameters_;
  ShardPlan plan_;
  std::vector<Bucket> buckets_;
};

/// Appends the tiles of a segment. @param state  index that the tile of the segment's first element gets
template <class Param, class Grad>
void append_tiles(const Segment& segment, Param* parameter, Grad* gradient, std::int64_t state,
                  std::vector<Tile>& tiles) {
  for (std::int64_t at = segment.flat.begin; at < segment.flat.end;) {
    const std::int64_t end = (std::min)((at / tile_elements + 1) * tile_elements, segment.flat.end);
    const std::int64_t done = at - segment.flat.begin;
    tiles.push_back({.parameter = parameter + done,
                     .gradient = gradient + done,
                     .state = state + done,
                     .count = static_cast<std::uint32_t>(end - at),
                     .group = segment.group,
                     .phase = static_cast<std::uint16_t>(at % grain_elements)});
    at = end;
  }
}

}  // namespace shardopt::inline v0::detail
