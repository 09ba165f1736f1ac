// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/block_reader.hpp>
#include <shardopt/checkpoint/checkpoint.hpp>
#include <shardopt/checkpoint/extracts.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace shardopt::inline v0::checkpoint::detail {

/// Hands all that is wanted of a checkpoint to a sink, file by file and block by block, each block verified
/// before any of it is used. Holds one block, whatever the size of the checkpoint.
/// @param all  whether blocks that nobody wants are read and verified, too
/// @param sink  is called with a target, an offset there, and the bytes that go there
/// @param told  is called with the bytes read so far
/// @throws CheckpointError for the first file that is damaged
template <class Sink, class Told>
void stream_states(const Checkpoint& checkpoint, const WantedStates& wanted, bool all, const Sink& sink,
                   const Told& told) {
  std::int64_t before = 0;
  for (std::size_t k = 0; k < checkpoint.manifest().files.size(); ++k) {
    const std::vector<Extract> extracts = wanted.of_file(checkpoint, k);
    if (extracts.empty() && !all) continue;
    BlockReader reader(checkpoint, k);
    reader.read(
        extracts, [&](std::int64_t) { return all; },
        [&](const Extract& extract, std::int64_t done, std::span<const std::byte> bytes) {
          sink(extract.target, extract.target_offset + done, bytes);
          told(before + reader.bytes_read());
        });
    before += reader.bytes_read();
    told(before);
  }
}

}  // namespace shardopt::inline v0::checkpoint::detail
