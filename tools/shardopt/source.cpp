// SPDX-License-Identifier: Apache-2.0
#include "source.hpp"

#include "command.hpp"
#include "format.hpp"

#include <shardopt/checkpoint/generations.hpp>
#include <shardopt/checkpoint/manifest.hpp>
#include <shardopt/checkpoint/posix_files.hpp>

#include <cstdio>
#include <filesystem>
#include <system_error>

namespace tool {

namespace checkpoint = shardopt::checkpoint;

bool is_directory_of_generations(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::is_directory(path, ignored) &&
         !checkpoint::PosixFiles::instance().exists(path / checkpoint::manifest_name);
}

std::filesystem::path find_checkpoint(const std::filesystem::path& path, bool quiet) {
  std::error_code code;
  const auto status = std::filesystem::status(path, code);
  if (status.type() == std::filesystem::file_type::not_found)
    throw UsageError("there is no " + printable(path.string()));
  if (status.type() == std::filesystem::file_type::none)
    throw UsageError(printable(path.string()) + " cannot be looked at: " + code.message());
  if (path.filename() == checkpoint::manifest_name)
    throw UsageError(printable(path.string()) + " is a manifest: give the folder that it lies in");
  if (!is_directory_of_generations(path)) return path;
  const std::filesystem::path newest = checkpoint::newest(path);
  if (!quiet) {
    const auto count = checkpoint::generations(path, checkpoint::PosixFiles::instance()).size();
    std::fprintf(stderr, "%s: taking the newest of %zu generation%s, %s\n", escaped(path.string()).c_str(),
                 count, count == 1 ? "" : "s", newest.filename().c_str());
  }
  return newest;
}

checkpoint::Checkpoint open_checkpoint(const std::filesystem::path& path, bool quiet) {
  return checkpoint::Checkpoint(find_checkpoint(path, quiet));
}

}  // namespace tool
