// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/agreement.hpp>
#include <shardopt/checkpoint/block_file.hpp>
#include <shardopt/checkpoint/checkpoint.hpp>
#include <shardopt/checkpoint/generations.hpp>
#include <shardopt/checkpoint/shard_file.hpp>

#include <algorithm>
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

/// @throws CheckpointError if there are any
inline void require_no_unlisted_files(const Checkpoint& checkpoint) {
  const std::vector<std::string> names = unlisted_files(checkpoint);
  if (names.empty()) return;
  throw CheckpointError("shardopt: " + in_quotes(checkpoint.path().string()) + " holds " +
                        in_quotes(names.front()) +
                        ", which its manifest does not name: a file of another generation; move it away");
}

/// Reads all of a file, and compares its header with what the manifest asks for. @return all that is damaged
/// @throws CheckpointError if it cannot be read
[[nodiscard]] inline std::vector<std::string> problems_of_file(
    const Checkpoint& checkpoint, std::size_t index, const std::function<void(std::int64_t)>& told) {
  const Manifest& manifest = checkpoint.manifest();
  const Manifest::File& described = manifest.files[index];
  BlockFile file(checkpoint, index);
  std::vector<std::byte> buffer(static_cast<std::size_t>((std::min)(block_bytes, described.bytes)));
  std::vector<std::string> problems;
  std::string header;
  const std::int64_t header_bytes = described.bytes - payload_bytes(manifest, described);
  std::int64_t damaged = 0;  // blocks in a row until now
  const std::int64_t blocks = blocks_in(described.bytes);
  for (std::int64_t block = 0; block <= blocks; ++block) {
    bool whole = true;
    if (block < blocks) {
      const std::int64_t begin = block * block_bytes;
      const auto bytes =
          std::span(buffer).first(static_cast<std::size_t>((std::min)(block_bytes, described.bytes - begin)));
      file.read(block, bytes);
      told(file.bytes_read());
      whole = file.is_whole(block, bytes);
      if (!checkpoint.merged() && begin < header_bytes)
        header.append(reinterpret_cast<const char*>(bytes.data()),
                      (std::min)(bytes.size(), static_cast<std::size_t>(header_bytes - begin)));
    }
    if (whole && damaged > 0) problems.push_back(file.damage(block - damaged, block - 1));
    damaged = whole ? 0 : damaged + 1;
  }
  if (problems.empty() && !checkpoint.merged() &&
      header != to_bytes(shard_header(manifest, static_cast<std::int64_t>(index), described.pieces))) {
    problems.push_back("shardopt: " + in_quotes(checkpoint.path_of(index).string()) +
                       " has another header than the manifest asks for");
  }
  return problems;
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
      const auto told = [&](std::int64_t done) {
        if (progress) progress(before + done, total);
      };
      const auto of_file = detail::problems_of_file(checkpoint, k, told);
      problems.insert(problems.end(), of_file.begin(), of_file.end());
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
