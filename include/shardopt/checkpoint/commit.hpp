// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/checkpoint/file_system.hpp>
#include <shardopt/checkpoint/generations.hpp>
#include <shardopt/checkpoint/json.hpp>
#include <shardopt/checkpoint/manifest.hpp>
#include <shardopt/checkpoint/manifest_text.hpp>

#include <chrono>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace shardopt::inline v0::checkpoint::detail {

/// Where one save takes place: the same on all ranks.
struct SavePlace {
  std::filesystem::path directory;  ///< of all generations
  std::filesystem::path saving;     ///< where files are written until the generation is complete
  std::filesystem::path complete;   ///< its name then
};

/// Reads a whole file. @throws CheckpointError, also for one larger than `most_bytes`
[[nodiscard]] inline std::string read_text(const FileSystem& files, const std::filesystem::path& path,
                                           std::int64_t most_bytes = std::int64_t{1} << 32) {
  const auto file = files.open(path);
  const std::int64_t bytes = file->size();
  if (bytes > most_bytes)
    throw CheckpointError("shardopt: " + in_quotes(path.string()) + " is too large to be what its name says");
  std::string text(static_cast<std::size_t>(bytes), '\0');
  file->read_at(0, std::as_writable_bytes(std::span(text.data(), text.size())));
  return text;
}

/// Writes a new file. @param durable  whether to wait for stable storage
inline void write_text(FileSystem& files, const std::filesystem::path& path, std::string_view text,
                       bool durable) {
  const auto file = files.create(path);
  file->write_at(0, std::as_bytes(std::span(text.data(), text.size())));
  if (durable) file->sync();
}

/// 16 hexadecimal digits that no other save has.
[[nodiscard]] inline std::string random_id() {
  std::random_device device;
  const auto time = static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  return hexadecimal((static_cast<std::uint64_t>(device()) << 32 | device()) ^ time);
}

/// Removes what saves and removals that were cut left behind.
inline void sweep(FileSystem& files, const std::filesystem::path& directory) {
  for (const auto& entry : files.list(directory)) {
    const std::string name = entry.name.string();
    if (name.starts_with(saving_prefix) || name.starts_with(removing_prefix))
      files.remove(directory / entry.name);
  }
}

/// On rank 0: chooses sequence and id, and makes the folder to write into. @return the folder's name
[[nodiscard]] inline std::string begin_generation(FileSystem& files, const std::filesystem::path& directory) {
  files.make_directory(directory);
  sweep(files, directory);
  const auto found = generations(directory, files);
  const std::int64_t sequence = found.empty() ? 1 : found.back().sequence + 1;
  const std::string name = std::string(saving_prefix) + std::to_string(sequence) + "-" + random_id();
  files.make_directory(directory / name);
  return name;
}

/// Where the generation whose folder has this name is written. Sets sequence and id of the manifest.
/// @throws CheckpointError if the name is none that begin_generation() gives
[[nodiscard]] inline SavePlace place_of(const std::filesystem::path& directory, const std::string& saving,
                                        Manifest& manifest) {
  std::string_view rest = saving;
  const auto sequence = take_number(rest, saving_prefix);
  if (!sequence || rest.size() != 17)
    throw CheckpointError("shardopt: rank 0 gave no folder to write into, but " + in_quotes(saving));
  manifest.sequence = *sequence;
  manifest.id = std::string(rest.substr(1));
  return {directory, directory / saving, directory / generation_name(manifest.sequence, manifest.iteration)};
}

/// A rank's note that its file is complete: what the manifest will say about it.
[[nodiscard]] inline std::filesystem::path part_path(const SavePlace& place, std::int64_t rank) {
  return place.saving / ("part-" + std::to_string(rank) + ".json");
}

/// Appears under its name when it is whole: others may be waiting for it.
inline void write_part(FileSystem& files, const SavePlace& place, std::int64_t rank,
                       const Manifest::File& file) {
  const auto path = part_path(place, rank);
  auto unfinished = path;
  unfinished += ".new";
  write_text(files, unfinished, text_of_json(json_of(file), "a rank's extra text"), false);
  files.rename(unfinished, path);
}

[[nodiscard]] inline Manifest::File read_part(const FileSystem& files, const SavePlace& place,
                                              std::int64_t rank) {
  const auto path = part_path(place, rank);
  const Json json = parse_json(read_text(files, path), path.string());
  return file_of(JsonReader(json, path.string()));
}

/// Removes all generations but the newest. @return what could not be removed, and why
[[nodiscard]] inline std::vector<std::string> prune(FileSystem& files, const std::filesystem::path& directory,
                                                    std::int64_t keep) {
  std::vector<std::string> warnings;
  if (keep == 0) return warnings;
  auto found = generations(directory, files);
  const auto kept = static_cast<std::size_t>(keep);
  if (found.size() <= kept) return warnings;
  found.resize(found.size() - kept);
  for (const Generation& old : found) {
    try {
      const auto removing = directory / (std::string(removing_prefix) + old.path.filename().string());
      files.remove(removing);
      files.rename(old.path, removing);
      files.remove(removing);
    } catch (const std::exception& error) {
      warnings.emplace_back(error.what());
    }
  }
  return warnings;
}

/// On rank 0, when all parts are there: writes the manifest, and makes the generation complete by one rename.
/// Everything in it is on stable storage before that, the rename itself when this returns.
/// @throws CheckpointError; the generation is then complete or not there
inline void commit(FileSystem& files, const SavePlace& place, Manifest manifest) {
  for (std::int64_t rank = 0; rank < manifest.world; ++rank)
    manifest.files.push_back(read_part(files, place, rank));
  for (std::int64_t rank = 0; rank < manifest.world; ++rank) files.remove(part_path(place, rank));
  write_text(files, place.saving / manifest_name, to_text(manifest), true);
  files.sync_directory(place.saving);
  files.rename(place.saving, place.complete);
  files.sync_directory(place.directory);
}

}  // namespace shardopt::inline v0::checkpoint::detail
