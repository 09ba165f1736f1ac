// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/manifest.hpp>
#include <shardopt/checkpoint/safetensors.hpp>
#include <shardopt/core/range.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace shardopt::inline v0::checkpoint {

/// The name of a piece's tensor in a rank's file: "layer.weight/exp_avg/256-512".
[[nodiscard]] inline std::string piece_name(const std::string& parameter, const std::string& state,
                                            Range range) {
  return parameter + "/" + state + "/" + std::to_string(range.begin) + "-" + std::to_string(range.end);
}

/// The header of a rank's file: each state's pieces in the order of the manifest. Of the manifest `files` is
/// not used.
[[nodiscard]] inline SafetensorsHeader shard_header(const Manifest& manifest, std::int64_t rank,
                                                    const std::vector<Manifest::Piece>& pieces) {
  SafetensorsHeader header;
  header.metadata = {{"format", "shardopt-shard"},
                     {"format_version", std::to_string(format_version)},
                     {"id", manifest.id},
                     {"sequence", std::to_string(manifest.sequence)},
                     {"iteration", std::to_string(manifest.iteration)},
                     {"rank", std::to_string(rank)},
                     {"world", std::to_string(manifest.world)}};
  for (const std::string& state : manifest.states) {
    for (const auto& piece : pieces) {
      const auto& parameter = manifest.parameters[static_cast<std::size_t>(piece.parameter)];
      header.append(piece_name(parameter.name, state, piece.range), {piece.range.size()});
    }
  }
  return header;
}

/// Appends a run of elements to a rank's pieces; it joins the last one where it follows it.
inline void append_piece(std::vector<Manifest::Piece>& pieces, std::int64_t parameter, Range range) {
  if (!pieces.empty() && pieces.back().parameter == parameter && pieces.back().range.end == range.begin) {
    pieces.back().range.end = range.end;
  } else {
    pieces.push_back({parameter, range});
  }
}

/// Elements of all pieces.
[[nodiscard]] inline std::int64_t elements_of(const std::vector<Manifest::Piece>& pieces) noexcept {
  std::int64_t sum = 0;
  for (const auto& piece : pieces) sum += piece.range.size();
  return sum;
}

/// Bytes of all states' numbers in a file.
[[nodiscard]] inline std::int64_t payload_bytes(const Manifest& manifest,
                                                const Manifest::File& file) noexcept {
  return elements_of(file.pieces) * static_cast<std::int64_t>(manifest.states.size() * sizeof(float));
}

}  // namespace shardopt::inline v0::checkpoint
