// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/solo.hpp>
#include <support/checkpoint_engine.hpp>
#include <support/durable_files.hpp>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

/// Complete checkpoints that are small enough to damage every bit of them.
namespace test {

inline const std::filesystem::path small_directory = "/runs/small";

/// Two groups, several buckets, an empty parameter: a few kilobytes in all.
[[nodiscard]] inline so::ParameterTable small_table() {
  return packed_table({{"w", {2, 129}, "decay"}, {"none", {0}, "plain"}, {"b", {3}, "plain"}});
}

/// Two generations of a run: of iterations 2 and 4.
[[nodiscard]] inline Disk small_checkpoints(int world, const so::ParameterTable& table = small_table()) {
  DurableFiles files;
  static_cast<void>(on_ranks(world, [&](HostThreads comm) {
    CheckpointEngine<CheckpointAdam> engine(table, checkpoint_config<CheckpointAdam>(), std::move(comm));
    for (int k = 0; k < 2; ++k) {
      engine.train(2);
      const std::string mine = "generator of rank " + std::to_string(engine.optimizer.rank());
      const ckpt::SaveOptions options{.extras = {{"data", "shard 7"}}, .rank_extra = mine, .files = &files};
      ckpt::save(engine.optimizer, small_directory, options, {});
    }
    return 0;
  }));
  return files.disk();
}

/// Loads without any other rank: fast.
using SoloAdam = so::ZeroOptimizer<so::AdamW, so::FlatSharding, so::Solo<so::Host>, so::FullPrecision>;

}  // namespace test
