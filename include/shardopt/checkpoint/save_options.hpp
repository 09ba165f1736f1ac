// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/checkpoint/file_system.hpp>
#include <shardopt/checkpoint/manifest.hpp>
#include <shardopt/checkpoint/posix_files.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace shardopt::inline v0::checkpoint {

/// How a checkpoint is saved. The same on every rank, but for `rank_extra` and `files`.
struct SaveOptions {
  /// Complete generations that are kept in the directory, the new one included; 0: all.
  std::int64_t keep = 0;
  /// Texts (UTF-8) of the engine's that come back at load on every rank: schedule position, data sampler, …
  std::map<std::string, std::string> extras = {};
  /// A text of this rank's own, such as a random generator's state; comes back on the same rank where the
  /// world is of the same size.
  std::string rank_extra = {};
  /// Where this data-parallel group stands in other dimensions: part of file names. Each group saves into a
  /// directory of its own.
  /// (No list in braces: GCC 12 breaks down over one where a template saves.)
  std::vector<Coordinate> coordinates = std::vector<Coordinate>(1, Coordinate{"pp", 0, 1});
  /// For saving in the background: how long a rank that has written its file waits for the others; at least
  /// 1 ms. milliseconds::max(): without end.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  FileSystem* files = &PosixFiles::instance();  ///< not null

  /// @throws std::invalid_argument naming the field and what is legal
  void validate() const {
    if (keep < 0)
      throw std::invalid_argument("shardopt: SaveOptions.keep must be at least 0 (0: all are kept)");
    if (timeout <= std::chrono::milliseconds::zero())
      throw std::invalid_argument("shardopt: SaveOptions.timeout must be at least 1 ms");
    if (files == nullptr) throw std::invalid_argument("shardopt: SaveOptions.files must not be null");
    if (!are_legal(coordinates)) {
      throw std::invalid_argument(
          "shardopt: SaveOptions.coordinates: names of letters and digits other than dp, each once, and "
          "indices below their counts are needed, not " +
          text_of(coordinates));
    }
  }
};

/// What was saved.
struct SaveReport {
  std::filesystem::path generation;  ///< its directory
  std::int64_t iteration = 0;        ///< steps taken when it was saved
  std::int64_t bytes = 0;            ///< of this rank's file
  /// On rank 0: what could not be tidied up. After a save in the background on any other: that it gave up
  /// waiting for rank 0, which did complete the generation.
  std::vector<std::string> warnings = {};
};

}  // namespace shardopt::inline v0::checkpoint
