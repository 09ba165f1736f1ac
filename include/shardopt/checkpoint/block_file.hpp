// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/checkpoint.hpp>
#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/checkpoint/checksum.hpp>
#include <shardopt/checkpoint/file_system.hpp>
#include <shardopt/checkpoint/json.hpp>
#include <shardopt/checkpoint/manifest.hpp>
#include <shardopt/checkpoint/safetensors.hpp>
#include <shardopt/checkpoint/shard_file.hpp>
#include <shardopt/core/error.hpp>
#include <shardopt/core/range.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace shardopt::inline v0::checkpoint::detail {

/// Bytes of a file that somebody wants.
struct Extract {
  std::int64_t offset = 0;         ///< in the file
  std::int64_t bytes = 0;          ///< more than 0
  std::size_t target = 0;          ///< the reader's own: where they go …
  std::int64_t target_offset = 0;  ///< … and where there
};

/// One file of a checkpoint, as the blocks that its checksums are of.
class BlockFile {
 public:
  /// @throws CheckpointError if the file is missing, or not as long as the manifest says
  BlockFile(const Checkpoint& checkpoint, std::size_t file)
      : checkpoint_(checkpoint),
        described_(checkpoint.manifest().files[file]),
        path_(checkpoint.path_of(file).string()),
        file_(checkpoint.files().open(checkpoint.path_of(file))) {
    if (file_->size() == described_.bytes) return;
    fail("has " + std::to_string(file_->size()) + " bytes, the manifest says " +
         std::to_string(described_.bytes) + stale());
  }

  /// Calls `each(block, bytes, first, last)` for the blocks that hold extracts and those that `verify(block)`
  /// names: with its bytes in the file, and iterators over the extracts that it holds a part of.
  /// @param extracts  by ascending offset, not overlapping
  template <class Verify, class Block>
  void for_each_block(const std::vector<Extract>& extracts, const Verify& verify, const Block& each) const {
    auto first = extracts.begin();
    for (std::int64_t block = 0; block < blocks_in(described_.bytes); ++block) {
      const std::int64_t begin = block * block_bytes;
      const Range bytes{begin, (std::min)(begin + block_bytes, described_.bytes)};
      while (first != extracts.end() && first->offset + first->bytes <= bytes.begin) ++first;
      auto last = first;
      while (last != extracts.end() && last->offset < bytes.end) ++last;
      if (first != last || verify(block)) each(block, bytes, first, last);
    }
  }

  /// Reads a block and verifies it. @throws CheckpointError if it is damaged
  void read_verified(std::int64_t block, std::span<std::byte> bytes) {
    read(block, bytes);
    if (!is_whole(block, bytes)) fail_as_damaged(block);
    if (block == 0 && !described_.checksums.empty()) require_header_length(bytes);
  }

  /// Reads a block as it is. @throws CheckpointError
  void read(std::int64_t block, std::span<std::byte> bytes) {
    file_->read_at(block * block_bytes, bytes);
    bytes_read_ += static_cast<std::int64_t>(bytes.size());
  }

  /// Whether a block has its checksum. Those of a merged file have none.
  [[nodiscard]] bool is_whole(std::int64_t block, std::span<const std::byte> bytes) const {
    return described_.checksums.empty() ||
           checksum(bytes) == described_.checksums[static_cast<std::size_t>(block)];
  }

  /// @throws CheckpointError that says so
  [[noreturn]] void fail_as_damaged(std::int64_t block) const { throw CheckpointError(damage(block, block)); }

  /// Says that blocks are damaged, from the first to the last.
  [[nodiscard]] std::string damage(std::int64_t first, std::int64_t last) const {
    return message("is damaged: bytes " + std::to_string(first * block_bytes) + ".." +
                   std::to_string((std::min)((last + 1) * block_bytes, described_.bytes)) +
                   " do not have the checksum that the manifest gives" + stale());
  }

  /// Bytes read so far.
  [[nodiscard]] std::int64_t bytes_read() const noexcept { return bytes_read_; }

 private:
  [[nodiscard]] std::string message(const std::string& what) const {
    return "shardopt: " + in_quotes(path_) + " " + what;
  }

  [[noreturn]] void fail(const std::string& why) const { throw CheckpointError(message(why)); }

  /// Numbers must begin where the manifest puts them.
  void require_header_length(std::span<const std::byte> first) const {
    const std::string_view text(reinterpret_cast<const char*>(first.data()),
                                (std::min)(first.size(), std::size_t{8}));
    const std::int64_t length = header_bytes_of(text, described_.bytes, path_);
    if (8 + length != described_.bytes - payload_bytes(checkpoint_.manifest(), described_))
      fail("has a header of another length than the manifest's pieces ask for");
  }

  /// ": it is of another generation", if the header says so. Reads without checking: for messages only.
  [[nodiscard]] std::string stale() const {
    try {
      const Json json = parse_json(header_text_of(*file_, path_), path_);
      const std::string id = JsonReader(json, path_).at("__metadata__").at("id").text();
      if (id != checkpoint_.manifest().id) return "; it is a file of another generation, with id " + id;
    } catch (const CheckpointError&) {
      // Then the header is damaged, too.
    }
    return {};
  }

  const Checkpoint& checkpoint_;
  const Manifest::File& described_;
  std::string path_;
  std::unique_ptr<ReadableFile> file_;
  std::int64_t bytes_read_ = 0;
};

}  // namespace shardopt::inline v0::checkpoint::detail
