// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/block_file.hpp>
#include <shardopt/checkpoint/checkpoint.hpp>
#include <shardopt/core/range.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace shardopt::inline v0::checkpoint::detail {

/// What somebody wants of a checkpoint: ranges of elements of states of parameters, and where they go.
class WantedStates {
 public:
  /// Wants elements of a state, each once. @param state, parameter  indices in the manifest
  /// @param target, target_offset  where the first of them goes; bytes
  void add(std::size_t state, std::int64_t parameter, Range range, std::size_t target,
           std::int64_t target_offset) {
    wanted_[{state, parameter}].emplace(range.end, Wanted{range, target, target_offset});
  }

  /// What a file has of it, by ascending offset.
  [[nodiscard]] std::vector<Extract> of_file(const Checkpoint& checkpoint, std::size_t file) const {
    std::vector<Extract> extracts;
    const auto offsets = checkpoint.offsets(file);
    const auto& pieces = checkpoint.manifest().files[file].pieces;
    for (std::size_t s = 0; s < offsets.size(); ++s) {
      for (std::size_t p = 0; p < pieces.size(); ++p) {
        const auto found = wanted_.find({s, pieces[p].parameter});
        if (found != wanted_.end()) append(found->second, pieces[p].range, offsets[s][p], extracts);
      }
    }
    std::sort(extracts.begin(), extracts.end(),
              [](const Extract& a, const Extract& b) { return a.offset < b.offset; });
    join_neighbours(extracts);
    return extracts;
  }

 private:
  struct Wanted {
    Range range;
    std::size_t target;
    std::int64_t target_offset;
  };
  /// By where they end, which is also the order of where they begin.
  using Wanteds = std::multimap<std::int64_t, Wanted>;

  /// Makes one of those that follow each other both in the file and at the target.
  static void join_neighbours(std::vector<Extract>& extracts) {
    if (extracts.empty()) return;
    auto last = extracts.begin();
    for (auto e = last + 1; e != extracts.end(); ++e) {
      if (e->target == last->target && e->offset == last->offset + last->bytes &&
          e->target_offset == last->target_offset + last->bytes) {
        last->bytes += e->bytes;
      } else {
        *++last = *e;
      }
    }
    extracts.erase(last + 1, extracts.end());
  }

  static void append(const Wanteds& wanted, Range piece, std::int64_t offset,
                     std::vector<Extract>& extracts) {
    constexpr std::int64_t size = sizeof(float);
    for (auto next = wanted.upper_bound(piece.begin); next != wanted.end(); ++next) {
      const Wanted& w = next->second;
      const std::int64_t begin = (std::max)(w.range.begin, piece.begin);
      const std::int64_t end = (std::min)(w.range.end, piece.end);
      if (begin >= end) break;
      extracts.push_back({.offset = offset + (begin - piece.begin) * size,
                          .bytes = (end - begin) * size,
                          .target = w.target,
                          .target_offset = w.target_offset + (begin - w.range.begin) * size});
    }
  }

  std::map<std::pair<std::size_t, std::int64_t>, Wanteds> wanted_;
};

}  // namespace shardopt::inline v0::checkpoint::detail
