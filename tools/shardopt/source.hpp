// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/checkpoint.hpp>

#include <filesystem>

namespace tool {

/// The checkpoint that a path means: a merged file, a generation's folder, or the newest generation of a
/// directory, which is then said on standard error unless `quiet`.
/// @throws UsageError if there is no such path; CheckpointError if there is no whole checkpoint
[[nodiscard]] std::filesystem::path find_checkpoint(const std::filesystem::path& path, bool quiet);

/// Opens what a path means.
[[nodiscard]] shardopt::checkpoint::Checkpoint open_checkpoint(const std::filesystem::path& path, bool quiet);

/// Whether a path is a directory of generations, and neither a generation nor a file.
[[nodiscard]] bool is_directory_of_generations(const std::filesystem::path& path);

}  // namespace tool
