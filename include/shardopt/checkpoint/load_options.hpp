// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/file_system.hpp>
#include <shardopt/checkpoint/manifest.hpp>
#include <shardopt/checkpoint/posix_files.hpp>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace shardopt::inline v0::checkpoint {

/// How a checkpoint is loaded. The same on every rank, but for `files`.
struct LoadOptions {
  /// Only parameters and masters: states, counters and hyper-parameters stay.
  bool weights_only = false;
  /// Hyper-parameters of the groups stay as configured; else they become the checkpoint's.
  bool keep_hyper_parameters = false;
  /// Loads what both sides have under the same name and shape, and leaves the rest as it stands; the report
  /// says what. Of another rule's checkpoint that is the parameters. Else every difference is an error.
  bool lenient = false;
  /// Where this data-parallel group stands in other dimensions: what the checkpoint's
  /// SaveOptions::coordinates must be. Nothing: whatever they are, and the report says.
  std::optional<std::vector<Coordinate>> coordinates = std::nullopt;
  const FileSystem* files = &PosixFiles::instance();  ///< not null

  /// @throws std::invalid_argument naming the field and what is legal
  void validate() const {
    if (files == nullptr) throw std::invalid_argument("shardopt: LoadOptions.files must not be null");
  }
};

/// What was loaded.
struct LoadReport {
  std::filesystem::path generation;                ///< its folder, or the merged file
  std::int64_t iteration = 0;                      ///< steps taken when it was saved
  std::int64_t updates = 0;                        ///< of them applied
  std::int64_t world = 1;                          ///< ranks that saved it; of a merged file 1
  std::vector<Coordinate> coordinates = {};        ///< SaveOptions::coordinates
  std::map<std::string, std::string> extras = {};  ///< SaveOptions::extras
  /// SaveOptions::rank_extra of this rank, where the world is of the same size; else empty, and a note says
  /// so. The others' stand in the manifest.
  std::string rank_extra = {};
  std::vector<std::string> notes = {};  ///< what differs and was not refused
  std::int64_t bytes_read = 0;          ///< by this rank
};

}  // namespace shardopt::inline v0::checkpoint
