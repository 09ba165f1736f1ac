// SPDX-License-Identifier: Apache-2.0
// Of files of several blocks one thread reads and another verifies.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <support/checkpoint_engine.hpp>
#include <support/durable_files.hpp>
#include <support/watched_files.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
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

/// The file that it wrote.
[[nodiscard]] std::filesystem::path shard_of(const DurableFiles& files) {
  return ckpt::generations(run_directory, files).back().path / ckpt::shard_name({{"pp", 0, 1}}, 0, 1);
}

}  // namespace

TEST_CASE("A large file is read in its order by one thread, and brings back every element to any ranks",
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
    return std::pair(engine.snapshot(), readers == std::set{std::this_thread::get_id()});
  });
  CHECK(loaded.front().first == saved);
  for (const auto& rank : loaded) CHECK(rank.second);
}

TEST_CASE("A block that cannot be read, and a damaged one before it: the first is told",
          "[checkpoint][host][law8]") {
  DurableFiles files;
  static_cast<void>(save_to(files));
  const auto path = shard_of(files);
  const bool damaged = GENERATE(false, true);
  const std::int64_t block = GENERATE(3, 5, 8);
  CAPTURE(damaged, block);
  const std::int64_t unreadable = block * ckpt::block_bytes + 5;
  if (damaged) {
    char& byte = files.bytes(path)[static_cast<std::size_t>(2 * ckpt::block_bytes)];
    byte = static_cast<char>(byte ^ 4);
  }
  const auto messages = on_ranks(1, [&](HostThreads comm) {
    LargeEngine engine = large_engine(std::move(comm));
    WatchedFiles watched(files);
    watched.before_read = [&](const std::filesystem::path& read, so::Range bytes) {
      if (read == path && bytes.contains(unreadable))
        throw so::CheckpointError("shardopt: the disk is on fire");
    };
    return message_of<so::CheckpointError>(
        [&] { ckpt::load(engine.optimizer, run_directory, {.files = &watched}, {}); });
  });
  CAPTURE(messages.front());
  CHECK((messages.front().find("the disk is on fire") != std::string::npos) == !damaged);
  CHECK((messages.front().find("is damaged: bytes 2097152..3145728") != std::string::npos) == damaged);
}

TEST_CASE("Damage in any block of a large file is seen, and nothing changes", "[checkpoint][host][law8]") {
  const int world = GENERATE(1, 2);
  DurableFiles files;
  static_cast<void>(save_to(files));
  const auto path = shard_of(files);
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

TEST_CASE("A verification names all blocks that are damaged, those in a row as one",
          "[checkpoint][host][law8]") {
  DurableFiles files;
  static_cast<void>(save_to(files));
  const auto path = shard_of(files);
  for (const std::size_t block : {0, 2, 3, 8}) {
    char& byte = files.bytes(path)[block * static_cast<std::size_t>(ckpt::block_bytes) + 9];
    byte = static_cast<char>(byte ^ 16);
  }
  const auto problems = ckpt::verify(ckpt::Checkpoint(path.parent_path(), files));
  const std::string end = std::to_string(files.bytes(path).size());
  REQUIRE(problems.size() == 3);
  CHECK(problems[0].find("bytes 0..1048576 ") != std::string::npos);
  CHECK(problems[1].find("bytes 2097152..4194304 ") != std::string::npos);
  CHECK(problems[2].find("bytes 8388608.." + end + " ") != std::string::npos);

  // Who looks for a whole one stops where damage shows.
  const WatchedFiles watched(files);
  CHECK(!ckpt::newest_whole(run_directory, watched));
  CHECK(watched.bytes_read().at(path.filename().string()) < 2 * ckpt::block_bytes);
}
