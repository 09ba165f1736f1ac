// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/checkpoint.hpp>
#include <shardopt/checkpoint/file_system.hpp>
#include <shardopt/core/range.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace shardopt::inline v0::checkpoint::detail {

/// Reads any elements of a checkpoint that was verified before: only their bytes, no blocks.
class ElementReader {
 public:
  explicit ElementReader(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {
    const auto& files = checkpoint.manifest().files;
    for (std::size_t f = 0; f < files.size(); ++f) {
      const auto offsets = checkpoint.offsets(f);
      for (std::size_t s = 0; s < offsets.size(); ++s) {
        for (std::size_t p = 0; p < files[f].pieces.size(); ++p) {
          const auto& piece = files[f].pieces[p];
          pieces_[{s, piece.parameter}].emplace(piece.range.end, Place{f, piece.range, offsets[s][p]});
        }
      }
    }
  }

  /// Fills `values` with elements of a state. @param state, parameter  indices in the manifest
  /// @throws CheckpointError if a file is gone
  void read(std::size_t state, std::int64_t parameter, std::int64_t begin, std::span<float> values) {
    const std::int64_t end = begin + static_cast<std::int64_t>(values.size());
    const auto& places = pieces_.at({state, parameter});
    for (std::int64_t at = begin; at < end;) {
      const Place& place = places.upper_bound(at)->second;
      const std::int64_t stop = (std::min)(end, place.range.end);
      const auto part =
          values.subspan(static_cast<std::size_t>(at - begin), static_cast<std::size_t>(stop - at));
      file(place.file)
          .read_at(place.offset + (at - place.range.begin) * static_cast<std::int64_t>(sizeof(float)),
                   std::as_writable_bytes(part));
      at = stop;
    }
  }

 private:
  /// Files that are open at a time: systems allow a process some thousand.
  static constexpr std::size_t max_open = 256;

  struct Place {
    std::size_t file;
    Range range;
    std::int64_t offset;
  };

  [[nodiscard]] const ReadableFile& file(std::size_t index) {
    const auto found = open_.find(index);
    if (found != open_.end()) return *found->second;
    if (open_.size() == max_open) open_.clear();
    return *open_.emplace(index, checkpoint_.files().open(checkpoint_.path_of(index))).first->second;
  }

  const Checkpoint& checkpoint_;
  /// By where pieces end. A consistent manifest covers every element once.
  std::map<std::pair<std::size_t, std::int64_t>, std::map<std::int64_t, Place>> pieces_;
  std::map<std::size_t, std::unique_ptr<ReadableFile>> open_;
};

}  // namespace shardopt::inline v0::checkpoint::detail
