// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/block_file.hpp>
#include <shardopt/checkpoint/block_reader.hpp>
#include <shardopt/checkpoint/checkpoint.hpp>
#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/checkpoint/follower.hpp>
#include <shardopt/checkpoint/memory_advice.hpp>
#include <shardopt/core/range.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <optional>
#include <span>
#include <vector>

namespace shardopt::inline v0::checkpoint::detail {

/// Reads one file of a checkpoint to staging memory, where bytes are before they are verified: nobody may use
/// them before read() returns. While one thread does nothing but read, in the order of the file, a second one
/// verifies what goes whole to one place and sees to the pages ahead.
class StagingReader {
 public:
  /// @param into  staging memory
  /// @throws CheckpointError if the file is missing, or not as long as the manifest says
  StagingReader(const Checkpoint& checkpoint, std::size_t file, std::byte* into)
      : reader_(checkpoint, file), into_(into) {}

  /// Reads the blocks that hold extracts, to their target offsets, and those that `verify(block)` names.
  /// @param extracts  by ascending offset, not overlapping
  /// @throws CheckpointError for the first block that is damaged or cannot be read
  template <class Verify>
  void read(const std::vector<Extract>& extracts, const Verify& verify) {
    std::vector<Placed> placed;
    reader_.file().for_each_block(extracts, verify,
                                  [&](std::int64_t block, Range bytes, auto first, auto last) {
                                    if (goes_whole(bytes, first, last))
                                      placed.push_back({block, place_of(bytes, *first)});
                                  });
    std::optional<Follower> follower;
    if (placed.size() >= blocks_worth_a_thread) {
      follower.emplace([&](std::int64_t piece) {
        const auto k = static_cast<std::size_t>(piece);
        prepare_pages(placed, k);
        return reader_.file().is_whole(placed[k].block, placed[k].bytes);
      });
    }
    std::exception_ptr failure;
    try {
      read_in_order(extracts, verify, placed, follower);
    } catch (...) {
      failure = std::current_exception();
    }
    if (follower) {
      // What it has found comes earlier in the file.
      const auto damaged = follower->finish();
      if (damaged) reader_.file().fail_as_damaged(placed[static_cast<std::size_t>(*damaged)].block);
    }
    if (failure) std::rethrow_exception(failure);
  }

  /// Bytes read so far.
  [[nodiscard]] std::int64_t bytes_read() const noexcept { return reader_.bytes_read(); }

 private:
  /// A block that goes whole to one place, and the place.
  struct Placed {
    std::int64_t block;
    std::span<std::byte> bytes;
  };

  static constexpr std::size_t blocks_worth_a_thread = 4;
  /// In one call: enough that a disk need not wait for the next.
  static constexpr std::size_t blocks_at_once = 8;
  /// Far enough for the time that the system takes to make their pages.
  static constexpr std::size_t blocks_ahead = 64;

  template <class Iterator>
  [[nodiscard]] static bool goes_whole(Range bytes, Iterator first, Iterator last) {
    return first != last && first->offset <= bytes.begin && bytes.end <= first->offset + first->bytes;
  }

  [[nodiscard]] std::span<std::byte> place_of(Range bytes, const Extract& extract) const {
    return {into_ + extract.target_offset + (bytes.begin - extract.offset),
            static_cast<std::size_t>(bytes.size())};
  }

  /// Of the blocks ahead of the k-th: before the first all, then one more each time.
  static void prepare_pages(const std::vector<Placed>& placed, std::size_t k) {
    const std::size_t end = (std::min)(k + blocks_ahead, placed.size());
    for (std::size_t ahead = k == 0 ? 0 : k + blocks_ahead - 1; ahead < end; ++ahead)
      make_resident(placed[ahead].bytes.data(), placed[ahead].bytes.size());
  }

  /// How many placed blocks, from the k-th on, lie side by side both in the file and in memory.
  [[nodiscard]] static std::size_t neighbours(const std::vector<Placed>& placed, std::size_t k) {
    std::size_t count = 1;
    while (count < blocks_at_once && k + count < placed.size()) {
      const Placed& before = placed[k + count - 1];
      const Placed& next = placed[k + count];
      if (next.block != before.block + 1 || next.bytes.data() != before.bytes.data() + before.bytes.size())
        break;
      ++count;
    }
    return count;
  }

  template <class Verify>
  void read_in_order(const std::vector<Extract>& extracts, const Verify& verify,
                     const std::vector<Placed>& placed, std::optional<Follower>& follower) {
    const auto copy = [&](const Extract& extract, std::int64_t done, std::span<const std::byte> bytes) {
      std::memcpy(into_ + extract.target_offset + done, bytes.data(), bytes.size());
    };
    BlockFile& file = reader_.file();
    std::size_t next = 0;  // of the placed blocks
    std::size_t read = 0;  // those before were read
    bool failed = false;
    file.for_each_block(extracts, verify, [&](std::int64_t block, Range bytes, auto first, auto last) {
      if (failed) return;
      if (!goes_whole(bytes, first, last)) return reader_.read_block(block, bytes, first, last, copy);
      const std::size_t k = next++;
      if (!follower) return file.read_verified(block, placed[k].bytes);
      if (k == read) read += read_neighbours(placed, k);
      failed = !follower->release();
    });
  }

  /// Reads placed blocks from the k-th on, as many as lie side by side both in the file and in memory. If
  /// they cannot be read together, the first alone: it may be a later one's fault. @return how many
  std::size_t read_neighbours(const std::vector<Placed>& placed, std::size_t k) {
    const std::size_t count = neighbours(placed, k);
    const std::span<std::byte> last = placed[k + count - 1].bytes;
    try {
      reader_.file().read(placed[k].block, {placed[k].bytes.data(), last.data() + last.size()});
      return count;
    } catch (const CheckpointError&) {
      if (count == 1) throw;
    }
    reader_.file().read(placed[k].block, placed[k].bytes);
    return 1;
  }

  BlockReader reader_;
  std::byte* into_;
};

}  // namespace shardopt::inline v0::checkpoint::detail
