// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/checkpoint.hpp>
#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/checkpoint/checksum.hpp>
#include <shardopt/checkpoint/shard_file.hpp>

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

/// Reads one file of a checkpoint block by block, each verified before any of it is used. Holds one block.
class BlockReader {
 public:
  /// @throws CheckpointError if the file is missing, or not as long as the manifest says
  BlockReader(const Checkpoint& checkpoint, std::size_t file)
      : checkpoint_(checkpoint),
        described_(checkpoint.manifest().files[file]),
        path_(checkpoint.path_of(file).string()),
        file_(checkpoint.files().open(checkpoint.path_of(file))) {
    if (file_->size() == described_.bytes) return;
    fail("has " + std::to_string(file_->size()) + " bytes, the manifest says " +
         std::to_string(described_.bytes) + stale());
  }

  /// Reads the blocks that hold extracts and those that `verify(block)` names.
  /// @param extracts  by ascending offset, not overlapping
  /// @param sink  is called with an extract, how much of it came before, and the next of its bytes
  /// @throws CheckpointError for the first block that is damaged
  template <class Verify, class Sink>
  void read(const std::vector<Extract>& extracts, const Verify& verify, const Sink& sink) {
    auto next = extracts.begin();
    for (std::int64_t block = 0; block < blocks_in(described_.bytes); ++block) {
      const std::int64_t begin = block * block_bytes;
      const std::int64_t end = (std::min)(begin + block_bytes, described_.bytes);
      while (next != extracts.end() && next->offset + next->bytes <= begin) ++next;
      const bool wanted = next != extracts.end() && next->offset < end;
      if (!wanted && !verify(block)) continue;
      const std::span<const std::byte> bytes = load(block, begin, end);
      for (auto e = next; e != extracts.end() && e->offset < end; ++e) {
        const std::int64_t from = (std::max)(e->offset, begin);
        const std::int64_t to = (std::min)(e->offset + e->bytes, end);
        sink(*e, from - e->offset,
             bytes.subspan(static_cast<std::size_t>(from - begin), static_cast<std::size_t>(to - from)));
      }
    }
  }

  /// Bytes read so far.
  [[nodiscard]] std::int64_t bytes_read() const noexcept { return bytes_read_; }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw CheckpointError("shardopt: " + in_quotes(path_) + " " + why);
  }

  [[nodiscard]] std::span<const std::byte> load(std::int64_t block, std::int64_t begin, std::int64_t end) {
    if (!buffer_)
      buffer_ =
          std::make_unique<std::byte[]>(static_cast<std::size_t>((std::min)(block_bytes, described_.bytes)));
    const std::span<std::byte> bytes(buffer_.get(), static_cast<std::size_t>(end - begin));
    file_->read_at(begin, bytes);
    bytes_read_ += end - begin;
    if (described_.checksums.empty()) return bytes;
    if (checksum(bytes) != described_.checksums[static_cast<std::size_t>(block)]) {
      fail("is damaged: bytes " + std::to_string(begin) + ".." + std::to_string(end) +
           " do not have the checksum that the manifest gives" + stale());
    }
    if (block == 0) require_header_length(bytes);
    return bytes;
  }

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
      std::string start(8, '\0');
      file_->read_at(0, std::as_writable_bytes(std::span(start.data(), start.size())));
      const std::int64_t length = header_bytes_of(start, file_->size(), path_);
      if (length > block_bytes) return {};
      std::string text(static_cast<std::size_t>(length), '\0');
      file_->read_at(8, std::as_writable_bytes(std::span(text.data(), text.size())));
      const Json json = parse_json(text, path_);
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
  std::unique_ptr<std::byte[]> buffer_;
  std::int64_t bytes_read_ = 0;
};

}  // namespace shardopt::inline v0::checkpoint::detail
