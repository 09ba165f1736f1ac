// SPDX-License-Identifier: Apache-2.0
// Files of eight blocks and more are read by two threads of a rank.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <support/checkpoint_engine.hpp>
#include <support/durable_files.hpp>
#include <support/watched_files.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using namespace test;

namespace {

using LargeEngine = CheckpointEngine<CheckpointAdam>;

/// Three states of it take nine blocks in one file.
[[nodiscard]] LargeEngine large_engine(HostThreads comm) {
  return {table_of_sizes({600'007, 100'003, 5}), CheckpointAdam::Config(), std::move(comm)};
}

/// Saved by one rank. @return all that a load must bring back
[[nodiscard]] Snapshot save_to(DurableFiles& files) {
  return on_ranks(1,
                  [&](HostThreads comm) {
                    LargeEngine engine = large_engine(std::move(comm));
                    engine.train_and_save(2, files);
                    return engine.snapshot();
                  })
      .front();
}

}  // namespace

TEST_CASE("A file that two threads read brings back every element, on any number of ranks",
          "[checkpoint][host][law8]") {
  const int world = GENERATE(1, 2, 3);
  CAPTURE(world);
  DurableFiles files;
  const Snapshot saved = save_to(files);
  const auto loaded = on_ranks(world, [&](HostThreads comm) {
    LargeEngine engine = large_engine(std::move(comm));
    std::set<std::thread::id> readers;
    WatchedFiles watched(files);
    watched.before = [&](const std::string& call, const std::filesystem::path& path) {
      if (call == "read" && path.extension() == ".safetensors") readers.insert(std::this_thread::get_id());
    };
    ckpt::load(engine.optimizer, run_directory, {.files = &watched}, {});
    return std::pair(engine.snapshot(), readers.size());
  });
  CHECK(loaded.front().first == saved);
  for (const auto& rank : loaded) CHECK(rank.second == 2);
}

TEST_CASE("Damage in any block of a file that two threads read is seen, and nothing changes",
          "[checkpoint][host][law8]") {
  const int world = GENERATE(1, 2);
  DurableFiles files;
  static_cast<void>(save_to(files));
  const auto path =
      ckpt::generations(run_directory, files).back().path / ckpt::shard_name({{"pp", 0, 1}}, 0, 1);
  std::string& bytes = files.bytes(path);
  REQUIRE(ckpt::blocks_in(static_cast<std::int64_t>(bytes.size())) == 9);
  for (std::size_t at = 1000; at < bytes.size(); at += static_cast<std::size_t>(ckpt::block_bytes)) {
    CAPTURE(world, at);
    bytes[at] = static_cast<char>(bytes[at] ^ 4);
    const auto ranks = on_ranks(world, [&](HostThreads comm) {
      LargeEngine engine = large_engine(std::move(comm));
      const Snapshot before = engine.own_snapshot();
      const std::string message = message_of<so::CheckpointError>(
          [&] { ckpt::load(engine.optimizer, run_directory, {.files = &files}, {}); });
      return std::pair(message, engine.own_snapshot() == before);
    });
    bytes[at] = static_cast<char>(bytes[at] ^ 4);
    for (const auto& [message, unchanged] : ranks) {
      CAPTURE(message);
      CHECK(message.find(path.string() + "' is damaged") != std::string::npos);
      CHECK(unchanged);
    }
  }
}
