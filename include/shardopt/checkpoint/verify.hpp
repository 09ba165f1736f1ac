// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/agreement.hpp>
#include <shardopt/checkpoint/block_reader.hpp>
#include <shardopt/checkpoint/checkpoint.hpp>
#include <shardopt/checkpoint/generations.hpp>
#include <shardopt/checkpoint/shard_file.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
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

/// Tensor files in a generation's folder that its manifest does not name.
[[nodiscard]] inline std::vector<std::string> unlisted_files(const Checkpoint& checkpoint) {
  std::vector<std::string> result;
  if (checkpoint.merged()) return result;
  std::set<std::string> known;
  for (const auto& file : checkpoint.manifest().files) known.insert(file.name);
  for (const auto& entry : checkpoint.files().list(checkpoint.path())) {
    const std::string name = entry.name.string();
    if (name.ends_with(".safetensors") && !known.contains(name)) result.push_back(name);
  }
  return result;
}

/// Reads all of a file, and compares its header with what the manifest asks for.
inline void verify_file(const Checkpoint& checkpoint, std::size_t file,
                        const std::function<void(std::int64_t)>& read) {
  const Manifest& manifest = checkpoint.manifest();
  const Manifest::File& described = manifest.files[file];
  BlockReader reader(checkpoint, file);
  std::string header;
  std::vector<Extract> extracts;
  const std::int64_t header_bytes = described.bytes - payload_bytes(manifest, described);
  if (!checkpoint.merged()) extracts.push_back({.offset = 0, .bytes = header_bytes});
  reader.read(
      extracts,
      [&](std::int64_t) {
        read(reader.bytes_read());
        return true;
      },
      [&](const Extract&, std::int64_t, std::span<const std::byte> bytes) {
        header.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      });
  read(reader.bytes_read());
  if (!checkpoint.merged() &&
      header != to_bytes(shard_header(manifest, static_cast<std::int64_t>(file), described.pieces))) {
    throw CheckpointError("shardopt: " + in_quotes(checkpoint.path_of(file).string()) +
                          " has another header than the manifest asks for");
  }
}

}  // namespace detail

/// Reads all of a checkpoint, holding one block at a time. @return what is wrong with it; nothing if it is
/// whole. A merged file has no checksums: its structure is checked
[[nodiscard]] inline std::vector<std::string> verify(const Checkpoint& checkpoint,
                                                     const Progress& progress = {}) {
  std::vector<std::string> problems;
  for (const std::string& name : detail::unlisted_files(checkpoint))
    problems.push_back("shardopt: " + detail::in_quotes((checkpoint.path() / name).string()) +
                       " is not in the manifest: a file of another generation?");
  const std::int64_t total = total_bytes(checkpoint.manifest());
  std::int64_t before = 0;
  for (std::size_t k = 0; k < checkpoint.manifest().files.size(); ++k) {
    const std::string failure = detail::failure_of([&] {
      detail::verify_file(checkpoint, k, [&](std::int64_t done) {
        if (progress) progress(before + done, total);
      });
    });
    if (!failure.empty()) problems.push_back(failure);
    before += checkpoint.manifest().files[k].bytes;
  }
  return problems;
}

/// The newest generation of a directory that is whole: all its bytes are read, and those of newer ones until
/// their damage shows.
[[nodiscard]] inline std::optional<Generation> newest_whole(
    const std::filesystem::path& directory, const FileSystem& files = PosixFiles::instance()) {
  const std::vector<Generation> all = generations(directory, files);
  for (auto generation = all.rbegin(); generation != all.rend(); ++generation) {
    bool whole = false;
    static_cast<void>(
        detail::failure_of([&] { whole = verify(Checkpoint(generation->path, files)).empty(); }));
    if (whole) return *generation;
  }
  return std::nullopt;
}

}  // namespace shardopt::inline v0::checkpoint
