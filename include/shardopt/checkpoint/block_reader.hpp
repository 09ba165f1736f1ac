// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/block_file.hpp>
#include <shardopt/checkpoint/checkpoint.hpp>
#include <shardopt/checkpoint/checksum.hpp>
#include <shardopt/core/range.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace shardopt::inline v0::checkpoint::detail {

/// Reads one file of a checkpoint block by block, each verified before any of it is used. Holds one block.
class BlockReader {
 public:
  /// @throws CheckpointError if the file is missing, or not as long as the manifest says
  BlockReader(const Checkpoint& checkpoint, std::size_t file)
      : file_(checkpoint, file),
        buffer_(std::make_unique_for_overwrite<std::byte[]>(
            static_cast<std::size_t>((std::min)(block_bytes, checkpoint.manifest().files[file].bytes)))) {}

  /// Reads the blocks that hold extracts and those that `verify(block)` names.
  /// @param extracts  by ascending offset, not overlapping
  /// @param sink  is called with an extract, how much of it came before, and the next of its bytes
  /// @throws CheckpointError for the first block that is damaged
  template <class Verify, class Sink>
  void read(const std::vector<Extract>& extracts, const Verify& verify, const Sink& sink) {
    file_.for_each_block(extracts, verify, [&](std::int64_t block, Range bytes, auto first, auto last) {
      read_block(block, bytes, first, last, sink);
    });
  }

  /// Reads one block, likewise. @param first, last  of the extracts that it holds a part of
  template <class Iterator, class Sink>
  void read_block(std::int64_t block, Range bytes, Iterator first, Iterator last, const Sink& sink) {
    file_.read_verified(block, {buffer_.get(), static_cast<std::size_t>(bytes.size())});
    for (auto e = first; e != last; ++e) {
      const std::int64_t from = (std::max)(e->offset, bytes.begin);
      const std::int64_t to = (std::min)(e->offset + e->bytes, bytes.end);
      sink(*e, from - e->offset,
           std::span<const std::byte>(buffer_.get() + (from - bytes.begin),
                                      static_cast<std::size_t>(to - from)));
    }
  }

  /// The same file, for blocks that go elsewhere than to a sink.
  [[nodiscard]] BlockFile& file() noexcept { return file_; }

  /// Bytes read so far.
  [[nodiscard]] std::int64_t bytes_read() const noexcept { return file_.bytes_read(); }

 private:
  BlockFile file_;
  std::unique_ptr<std::byte[]> buffer_;
};

}  // namespace shardopt::inline v0::checkpoint::detail
