// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/checkpoint/file_system.hpp>
#include <shardopt/checkpoint/manifest.hpp>
#include <shardopt/checkpoint/posix_files.hpp>
#include <shardopt/core/error.hpp>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace shardopt::inline v0::checkpoint {

/// One complete checkpoint in a directory of checkpoints: "generation-7-iteration-2000".
struct Generation {
  std::int64_t sequence = 0;  ///< counts up with each save, whatever the iteration
  std::int64_t iteration = 0;
  std::filesystem::path path;  ///< its directory
};

namespace detail {

/// What is being written has this prefix until it is complete.
inline constexpr std::string_view saving_prefix = ".saving-";
/// What is being removed has this one: it is gone for readers at once, whatever is left of it.
inline constexpr std::string_view removing_prefix = ".removing-";

/// Takes a prefix and a number from the front of a text.
[[nodiscard]] inline std::optional<std::int64_t> take_number(std::string_view& text,
                                                             std::string_view prefix) {
  std::int64_t value = 0;
  if (!text.starts_with(prefix)) return std::nullopt;
  text.remove_prefix(prefix.size());
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || value < 0) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return value;
}

}  // namespace detail

/// The directory's name of a generation.
[[nodiscard]] inline std::string generation_name(std::int64_t sequence, std::int64_t iteration) {
  return "generation-" + std::to_string(sequence) + "-iteration-" + std::to_string(iteration);
}

/// The complete checkpoints of a directory, oldest first: by number, not by text. What was begun and never
/// completed is not among them. @throws CheckpointError if the directory cannot be read
[[nodiscard]] inline std::vector<Generation> generations(const std::filesystem::path& directory,
                                                         const FileSystem& files) {
  std::vector<Generation> found;
  for (const auto& entry : files.list(directory)) {
    const std::string name = entry.name.string();
    std::string_view rest = name;
    const auto sequence = detail::take_number(rest, "generation-");
    if (!entry.is_directory || !sequence) continue;
    const auto iteration = detail::take_number(rest, "-iteration-");
    if (!iteration || !rest.empty() || name != generation_name(*sequence, *iteration)) continue;
    found.push_back({*sequence, *iteration, directory / entry.name});
  }
  std::sort(found.begin(), found.end(),
            [](const Generation& a, const Generation& b) { return a.sequence < b.sequence; });
  return found;
}

/// What a path means: a generation's folder or a merged file as it stands; of a folder of generations the
/// newest. @throws CheckpointError if there is no checkpoint
[[nodiscard]] inline std::filesystem::path newest(const std::filesystem::path& path,
                                                  const FileSystem& files = PosixFiles::instance()) {
  if (files.exists(path / manifest_name)) return path;
  const bool is_directory = files.exists(path / ".");
  if (!is_directory && (files.exists(path) || path.extension() == ".safetensors")) return path;
  const std::vector<Generation> found = generations(path, files);
  if (!found.empty()) return found.back().path;
  std::int64_t begun = 0;
  for (const auto& entry : files.list(path))
    begun += entry.name.string().starts_with(detail::saving_prefix) ? 1 : 0;
  throw CheckpointError("shardopt: there is no complete checkpoint in " + detail::in_quotes(path.string()) +
                        (begun > 0 ? " (" + std::to_string(begun) + " begun and never completed)" : ""));
}

}  // namespace shardopt::inline v0::checkpoint
