// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/agreement.hpp>
#include <shardopt/checkpoint/background_saves.hpp>
#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/checkpoint/file_system.hpp>
#include <shardopt/checkpoint/generations.hpp>
#include <shardopt/checkpoint/json.hpp>
#include <shardopt/checkpoint/manifest.hpp>
#include <shardopt/checkpoint/manifest_text.hpp>
#include <shardopt/core/random_bits.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <span>
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

/// Reads a whole file. @throws CheckpointError, also for one larger than `max_bytes`
[[nodiscard]] inline std::string read_text(const FileSystem& files, const std::filesystem::path& path,
                                           std::int64_t max_bytes = std::int64_t{1} << 32) {
  const auto file = files.open(path);
  const std::int64_t bytes = file->size();
  if (bytes > max_bytes)
    throw CheckpointError("shardopt: " + in_quotes(path.string()) + " is too large to be what its name says");
  std::string text(static_cast<std::size_t>(bytes), '\0');
  file->read_at(0, std::as_writable_bytes(std::span(text)));
  return text;
}

/// Writes a new file. @param durable  whether to wait for stable storage
inline void write_text(FileSystem& files, const std::filesystem::path& path, std::string_view text,
                       bool durable) {
  const auto file = files.create(path);
  file->write_at(0, std::as_bytes(std::span(text)));
  if (durable) file->sync();
}

/// Writes a new file that gets its name when it is whole: other ranks may be waiting for it.
inline void write_note(FileSystem& files, const std::filesystem::path& path, std::string_view text) {
  auto unfinished = path;
  unfinished += ".new";
  write_text(files, unfinished, text, false);
  files.rename(unfinished, path);
}

/// 16 hexadecimal digits that no other save has.
[[nodiscard]] inline std::string random_id() { return hexadecimal(shardopt::detail::random_bits()); }

/// Takes the name from a folder that is to be removed: it is gone for readers at once. @return its new one
[[nodiscard]] inline std::filesystem::path take_name(FileSystem& files, const std::filesystem::path& folder) {
  const auto name = folder.parent_path() / (std::string(removing_prefix) + folder.filename().string());
  files.remove(name);
  files.rename(folder, name);
  return name;
}

/// Removes what saves and removals that were cut left behind. A folder loses its name before any of it is
/// removed: if another process completes it at this instant, one of the two renames fails, and what has a
/// generation's name is whole all the same.
/// @throws CheckpointError if a save of this process is still being written there
inline void sweep(FileSystem& files, const std::filesystem::path& directory) {
  std::vector<std::filesystem::path> begun;
  std::vector<std::filesystem::path> left;
  for (const auto& entry : files.list(directory)) {
    const std::string name = entry.name.string();
    if (name.starts_with(saving_prefix)) begun.push_back(directory / entry.name);
    if (name.starts_with(removing_prefix)) left.push_back(directory / entry.name);
  }
  for (const auto& folder : begun) {
    if (BackgroundSaves::contain(folder.filename().string()))
      throw CheckpointError("shardopt: a save in the background still writes to " +
                            in_quotes(directory.string()) +
                            ": call AsyncSaver::wait() before the next save there");
  }
  for (const auto& folder : begun) left.push_back(take_name(files, folder));
  // They may have got these names an instant ago: see prune().
  if (!left.empty()) files.sync_directory(directory);
  for (const auto& path : left) files.remove(path);
}

/// Makes a directory and those above it, each on stable storage in the one that holds it.
inline void make_durable_directory(FileSystem& files, const std::filesystem::path& directory) {
  std::vector<std::filesystem::path> holders;
  for (auto made = directory; !made.empty() && !files.exists(made); made = made.parent_path())
    holders.push_back(made.has_parent_path() ? made.parent_path() : ".");
  files.make_directory(directory);
  for (const auto& holder : holders) files.sync_directory(holder);
}

/// @throws CheckpointError if a directory is a generation, or lies in one
inline void require_no_generation(const FileSystem& files, const std::filesystem::path& directory) {
  const auto holder = directory.has_parent_path() ? directory.parent_path() : std::filesystem::path(".");
  for (const auto& path : {directory, holder}) {
    if (files.exists(path / manifest_name))
      throw CheckpointError("shardopt: " + in_quotes(path.string()) +
                            " is a generation; a new one goes into a directory of generations");
  }
}

/// On rank 0: chooses sequence and id, and makes the folder to write into. @return the folder's name
[[nodiscard]] inline std::string begin_generation(FileSystem& files, const std::filesystem::path& directory) {
  require_no_generation(files, directory);
  make_durable_directory(files, directory);
  sweep(files, directory);
  const auto found = generations(directory, files);
  if (!found.empty() && found.back().sequence == (std::numeric_limits<std::int64_t>::max)())
    throw CheckpointError("shardopt: " + in_quotes(found.back().path.string()) +
                          " has the last number that a generation can have: rename it");
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

inline void write_part(FileSystem& files, const SavePlace& place, std::int64_t rank,
                       const Manifest::File& file) {
  write_note(files, part_path(place, rank), text_of_json(json_of(file), "a rank's extra text"));
}

[[nodiscard]] inline Manifest::File read_part(const FileSystem& files, const SavePlace& place,
                                              std::int64_t rank) {
  const auto path = part_path(place, rank);
  const Json json = parse_json(read_text(files, path), path.string());
  return file_of(JsonReader(json, path.string()));
}

/// Removes all generations but the newest. What goes loses its name for good before any of it is removed: cut
/// at any instant, all that is named a generation is whole. @return what could not be removed, and why
[[nodiscard]] inline std::vector<std::string> prune(FileSystem& files, const std::filesystem::path& directory,
                                                    std::int64_t keep) {
  std::vector<std::string> warnings;
  if (keep == 0) return warnings;
  const auto attempt = [&](const auto& body) {
    const std::string failure = failure_of(body);
    if (!failure.empty()) warnings.push_back(failure);
    return failure.empty();
  };
  std::vector<Generation> old;
  attempt([&] { old = generations(directory, files); });
  old.resize(old.size() - (std::min)(old.size(), static_cast<std::size_t>(keep)));
  std::vector<std::filesystem::path> removing;
  for (const Generation& generation : old)
    attempt([&] { removing.push_back(take_name(files, generation.path)); });
  if (removing.empty() || !attempt([&] { files.sync_directory(directory); })) return warnings;
  for (const auto& name : removing) attempt([&] { files.remove(name); });
  return warnings;
}

/// On rank 0, when all parts are there: writes the manifest, and makes the generation complete by one rename.
/// Everything in it is on stable storage before that, the rename itself when this returns.
/// @throws CheckpointError; the generation is then not there, or complete, as the text says
inline void commit(FileSystem& files, const SavePlace& place, Manifest manifest) {
  for (std::int64_t rank = 0; rank < manifest.world; ++rank)
    manifest.files.push_back(read_part(files, place, rank));
  for (std::int64_t rank = 0; rank < manifest.world; ++rank) files.remove(part_path(place, rank));
  write_text(files, place.saving / manifest_name, to_text(manifest), true);
  files.sync_directory(place.saving);
  files.rename(place.saving, place.complete);
  const std::string failure = failure_of([&] { files.sync_directory(place.directory); });
  if (!failure.empty()) {
    throw CheckpointError(failure + "; " + in_quotes(place.complete.string()) +
                          " is complete all the same, unless the power goes");
  }
}

}  // namespace shardopt::inline v0::checkpoint::detail
