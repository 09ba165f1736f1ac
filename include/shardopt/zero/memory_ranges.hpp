// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/error.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace shardopt::inline v0::detail {

/// Pieces of the engine's memory, which must not overlap: the optimizer writes them for different ends.
class MemoryRanges {
 public:
  /// Adds `bytes` bytes. Empty pieces overlap nothing. @param kind, name  for messages; must outlive this
  void add(const void* address, std::int64_t bytes, std::string_view kind, std::string_view name) {
    if (bytes <= 0) return;
    const auto begin = reinterpret_cast<std::uintptr_t>(address);
    ranges_.push_back({begin, begin + static_cast<std::uintptr_t>(bytes), kind, name});
  }

  /// @throws std::invalid_argument naming two pieces that overlap
  void require_disjoint() {
    std::sort(ranges_.begin(), ranges_.end(),
              [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
    for (std::size_t k = 1; k < ranges_.size(); ++k) {
      if (ranges_[k].begin >= ranges_[k - 1].end) continue;
      throw std::invalid_argument("shardopt: " + text_of(ranges_[k - 1]) + " and " + text_of(ranges_[k]) +
                                  " overlap in memory" + advice(ranges_[k - 1], ranges_[k]));
    }
  }

 private:
  struct Piece {
    std::uintptr_t begin;
    std::uintptr_t end;
    std::string_view kind;
    std::string_view name;
  };

  [[nodiscard]] static std::string advice(const Piece& a, const Piece& b) {
    return a.kind == b.kind && a.kind == "parameter" ? "; tied weights are added with .alias_of" : "";
  }

  [[nodiscard]] static std::string text_of(const Piece& piece) {
    return piece.name.empty() ? std::string(piece.kind)
                              : std::string(piece.kind) + " " + in_quotes(piece.name);
  }

  std::vector<Piece> ranges_;
};

}  // namespace shardopt::inline v0::detail
