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
#include <cstring>
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
    for_each_block(extracts, verify, [&](std::int64_t block, Range bytes, auto first, auto last) {
      load(block, bytes.begin, buffer(bytes.size()));
      hand_out(bytes, first, last, sink);
    });
  }

  /// Likewise, to `into + target_offset`, where all bytes are before they are verified. Of the blocks that
  /// are to be read it takes each `readers`-th one from the `reader`-th on: readers on several threads share
  /// a file.
  template <class Verify>
  void read_into(std::byte* into, const std::vector<Extract>& extracts, const Verify& verify,
                 std::int64_t reader, std::int64_t readers) {
    std::int64_t turn = 0;
    for_each_block(extracts, verify, [&](std::int64_t block, Range bytes, auto first, auto last) {
      if (turn++ % readers != reader) return;
      if (first != last && first->offset <= bytes.begin && bytes.end <= first->offset + first->bytes) {
        std::byte* const to = into + first->target_offset + (bytes.begin - first->offset);
        load(block, bytes.begin, {to, static_cast<std::size_t>(bytes.size())});
        return;
      }
      load(block, bytes.begin, buffer(bytes.size()));
      hand_out(bytes, first, last,
               [&](const Extract& extract, std::int64_t done, std::span<const std::byte> some) {
                 std::memcpy(into + extract.target_offset + done, some.data(), some.size());
               });
    });
  }

  /// Bytes read so far.
  [[nodiscard]] std::int64_t bytes_read() const noexcept { return bytes_read_; }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw CheckpointError("shardopt: " + in_quotes(path_) + " " + why);
  }

  /// Calls its argument with each block that is to be read, its bytes, and the extracts from the first to
  /// behind the last that it holds a part of.
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

  /// Calls the sink with what the buffer's block has of each extract.
  template <class Iterator, class Sink>
  void hand_out(Range block, Iterator first, Iterator last, const Sink& sink) const {
    for (auto e = first; e != last; ++e) {
      const std::int64_t from = (std::max)(e->offset, block.begin);
      const std::int64_t to = (std::min)(e->offset + e->bytes, block.end);
      sink(*e, from - e->offset,
           std::span<const std::byte>(buffer_.get() + (from - block.begin),
                                      static_cast<std::size_t>(to - from)));
    }
  }

  [[nodiscard]] std::span<std::byte> buffer(std::int64_t bytes) {
    if (!buffer_)
      buffer_ =
          std::make_unique<std::byte[]>(static_cast<std::size_t>((std::min)(block_bytes, described_.bytes)));
    return {buffer_.get(), static_cast<std::size_t>(bytes)};
  }

  void load(std::int64_t block, std::int64_t begin, std::span<std::byte> bytes) {
    file_->read_at(begin, bytes);
    const auto size = static_cast<std::int64_t>(bytes.size());
    bytes_read_ += size;
    if (described_.checksums.empty()) return;
    if (checksum(bytes) != described_.checksums[static_cast<std::size_t>(block)]) {
      fail("is damaged: bytes " + std::to_string(begin) + ".." + std::to_string(begin + size) +
           " do not have the checksum that the manifest gives" + stale());
    }
    if (block == 0) require_header_length(bytes);
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
  std::unique_ptr<std::byte[]> buffer_;
  std::int64_t bytes_read_ = 0;
};

}  // namespace shardopt::inline v0::checkpoint::detail
