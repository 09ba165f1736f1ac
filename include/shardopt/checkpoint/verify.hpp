// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/agreement.hpp>
#include <shardopt/checkpoint/block_file.hpp>
#include <shardopt/checkpoint/checkpoint.hpp>
#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/checkpoint/file_system.hpp>
#include <shardopt/checkpoint/generations.hpp>
#include <shardopt/checkpoint/shard_file.hpp>
#include <shardopt/core/range.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <system_error>
#include <vector>

namespace shardopt::inline v0::checkpoint {

/// Is told how many bytes of how many are done.
using Progress = std::function<void(std::int64_t done, std::int64_t total)>;

/// Bytes of all files.
[[nodiscard]] inline std::int64_t total_bytes(const Manifest& manifest) noexcept {
  std::int64_t sum = 0;
  for (const auto& file : manifest.files) sum += file.bytes;
  return sum;
}

namespace detail {

/// What is wrong with a generation's folder: tensor files that its manifest does not name.
[[nodiscard]] inline std::vector<std::string> problems_of_folder(const Checkpoint& checkpoint) {
  std::vector<std::string> problems;
  if (checkpoint.merged()) return problems;
  std::set<std::string> known;
  for (const auto& file : checkpoint.manifest().files) known.insert(file.name);
  for (const auto& entry : checkpoint.files().list(checkpoint.path())) {
    const std::string name = entry.name.string();
    if (name.ends_with(".safetensors") && !known.contains(name))
      problems.push_back("shardopt: " + in_quotes((checkpoint.path() / name).string()) +
                         " is not in the manifest: a file of another generation? Move it away");
  }
  return problems;
}

/// @throws CheckpointError for the first of its problems
inline void require_clean_folder(const Checkpoint& checkpoint) {
  const std::vector<std::string> problems = problems_of_folder(checkpoint);
  if (!problems.empty()) throw CheckpointError(problems.front());
}

/// How much is told of what is damaged.
enum class Told : bool { first, all };

/// Reads a file block by block, and compares its header with what the manifest asks for.
/// @param read  is called with the bytes read so far
/// @param problems  what is wrong is appended
/// @throws CheckpointError if the file is missing, or not as long as the manifest says
inline void verify_file(const Checkpoint& checkpoint, std::size_t index, Told told,
                        const std::function<void(std::int64_t)>& read, std::vector<std::string>& problems) {
  const Manifest& manifest = checkpoint.manifest();
  const Manifest::File& described = manifest.files[index];
  BlockFile file(checkpoint, index);
  std::vector<std::byte> buffer(static_cast<std::size_t>((std::min)(block_bytes, described.bytes)));
  std::string header;
  const std::int64_t header_bytes =
      checkpoint.merged() ? 0 : described.bytes - payload_bytes(manifest, described);
  std::vector<Range> damaged;  // blocks
  const std::string failure = failure_of([&] {
    for (std::int64_t block = 0; block < blocks_in(described.bytes); ++block) {
      const std::int64_t begin = block * block_bytes;
      const auto bytes =
          std::span(buffer).first(static_cast<std::size_t>((std::min)(block_bytes, described.bytes - begin)));
      file.read(block, bytes);
      read(file.bytes_read());
      const std::int64_t of_header = (std::min)(file.bytes_read(), header_bytes) - begin;
      if (of_header > 0)
        header.append(reinterpret_cast<const char*>(bytes.data()), static_cast<std::size_t>(of_header));
      if (file.is_whole(block, bytes)) continue;
      if (damaged.empty() || damaged.back().end < block) damaged.push_back({block, block});
      damaged.back().end = block + 1;
      if (told == Told::first) return;
    }
  });
  for (const Range& blocks : damaged) problems.push_back(file.damage(blocks.begin, blocks.end - 1));
  if (!failure.empty()) {
    problems.push_back(failure);
  } else if (damaged.empty() && !checkpoint.merged() &&
             header != to_bytes(shard_header(manifest, static_cast<std::int64_t>(index), described.pieces))) {
    problems.push_back("shardopt: " + in_quotes(checkpoint.path_of(index).string()) +
                       " has another header than the manifest asks for");
  }
}

/// Whether a generation's files cannot be opened for a reason that says nothing of what they hold.
[[nodiscard]] inline bool is_withheld(const Generation& generation, const FileSystem& files) {
  try {
    for (const auto& entry : files.list(generation.path)) {
      if (!entry.is_directory) static_cast<void>(files.open(generation.path / entry.name));
    }
  } catch (const FileError& error) {
    const std::error_code code = error.code();
    return code == std::errc::permission_denied || code == std::errc::operation_not_permitted ||
           code == std::errc::too_many_files_open || code == std::errc::too_many_files_open_in_system ||
           code == std::errc::not_enough_memory;
  } catch (const CheckpointError&) {
    return false;
  }
  return false;
}

/// verify(), up to the first file with a problem if that is all that is asked for.
[[nodiscard]] inline std::vector<std::string> problems_of(const Checkpoint& checkpoint, Told told,
                                                          const Progress& progress) {
  std::vector<std::string> problems = problems_of_folder(checkpoint);
  const std::int64_t total = total_bytes(checkpoint.manifest());
  std::int64_t before = 0;
  for (std::size_t k = 0; k < checkpoint.manifest().files.size(); ++k) {
    if (told == Told::first && !problems.empty()) break;
    const auto read = [&](std::int64_t bytes) {
      if (progress) progress(before + bytes, total);
    };
    const std::string failure = failure_of([&] { verify_file(checkpoint, k, told, read, problems); });
    if (!failure.empty()) problems.push_back(failure);
    before += checkpoint.manifest().files[k].bytes;
  }
  return problems;
}

}  // namespace detail

/// Reads all of a checkpoint, holding one block at a time. @return what is wrong with it; nothing if it is
/// whole. A merged file has no checksums: its structure is checked
[[nodiscard]] inline std::vector<std::string> verify(const Checkpoint& checkpoint,
                                                     const Progress& progress = {}) {
  return detail::problems_of(checkpoint, detail::Told::all, progress);
}

/// The newest generation of a directory that is whole: all its bytes are read, and those of newer ones until
/// their damage shows. None where that cannot be told of a newer one: its files may not be opened.
[[nodiscard]] inline std::optional<Generation> newest_whole(
    const std::filesystem::path& directory, const FileSystem& files = PosixFiles::instance()) {
  const std::vector<Generation> all = generations(directory, files);
  for (auto generation = all.rbegin(); generation != all.rend(); ++generation) {
    if (detail::is_withheld(*generation, files)) break;
    bool whole = false;
    static_cast<void>(detail::failure_of([&] {
      const Checkpoint checkpoint(generation->path, files);
      whole = detail::problems_of(checkpoint, detail::Told::first, {}).empty();
    }));
    if (whole) return *generation;
  }
  return std::nullopt;
}

}  // namespace shardopt::inline v0::checkpoint
