// SPDX-License-Identifier: Apache-2.0
// Saves that fail on one rank, or that ranks do not make together: every rank is told, and what was there
// stays.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <support/checkpoint_engine.hpp>
#include <support/durable_files.hpp>
#include <support/watched_collective.hpp>
#include <support/watched_files.hpp>

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using namespace test;

namespace {

using WatchedAdam = so::ZeroOptimizer<so::AdamW, so::FlatSharding, Watched<HostThreads>, so::FullPrecision>;

/// What one rank saw of a save of iteration 20 over one of iteration 10, and of the next one.
struct Seen {
  std::string message;  ///< of the save that was to fail; empty: it did not
  std::string failed;   ///< the call that was made to fail on this rank
  std::int64_t calls = 0;
  std::int64_t bytes = 0;
  std::int64_t loaded = 0;  ///< by a load behind it
  bool same = false;        ///< the state that was loaded is the one of that iteration
  std::string left;         ///< behind the next good save: what does not belong there
};

/// Saves iteration 10, lets `arrange` set up a rank's files, saves iteration 20, loads, saves once more.
template <class Arrange>
[[nodiscard]] std::vector<Seen> over_an_old_one(int world, std::int64_t keep, const Arrange& arrange) {
  DurableFiles disk;
  return on_ranks(world, [&](HostThreads comm) {
    Seen seen;
    AdamEngine engine(std::move(comm));
    const int rank = engine.optimizer.rank();
    engine.train_and_save(10, disk);
    std::vector<Snapshot> known = {engine.own_snapshot()};
    engine.train(10);
    known.push_back(engine.own_snapshot());
    WatchedFiles files(disk);
    arrange(rank, files);
    seen.message = message_of<so::CheckpointError>(
        [&] { ckpt::save(engine.optimizer, run_directory, {.keep = keep, .files = &files}, {}); });
    seen.failed = files.failed();
    seen.calls = files.calls();
    seen.bytes = files.bytes_written();
    engine.train(1);
    seen.loaded = ckpt::load(engine.optimizer, run_directory, {.files = &disk}, {}).iteration;
    for (const Snapshot& snapshot : known) seen.same = seen.same || engine.own_snapshot() == snapshot;
    ckpt::save(engine.optimizer, run_directory, {.keep = keep, .files = &disk}, {});
    static_cast<void>(engine.optimizer.exchange(""));
    for (const auto& entry : disk.list(run_directory)) {
      const std::string name = entry.name.string();
      if (!name.starts_with("generation-")) seen.left += name + " ";
    }
    for (const auto& generation : ckpt::generations(run_directory, disk)) {
      for (const auto& problem : ckpt::verify(ckpt::Checkpoint(generation.path, disk))) seen.left += problem;
      if (disk.list(generation.path).size() != static_cast<std::size_t>(world) + 1)
        seen.left += "more than shards and manifest in " + generation.path.string();
    }
    return seen;
  });
}

}  // namespace

TEST_CASE("Whatever call of whatever rank fails in a save, every rank is told and a whole checkpoint stays",
          "[checkpoint][host][B082]") {
  constexpr int world = 3;
  const std::string reason = GENERATE("No space left on device", "Permission denied");
  const int bad = GENERATE(0, 1, 2);
  const std::int64_t keep = GENERATE(0, 1);
  CAPTURE(bad, keep, reason);
  const auto good = over_an_old_one(world, keep, [](int, WatchedFiles&) {});
  for (const Seen& seen : good) REQUIRE(seen.message == "");
  const std::int64_t calls = good[static_cast<std::size_t>(bad)].calls;
  REQUIRE(calls > 4);
  for (std::int64_t call = 1; call <= calls; ++call) {
    const auto ranks = over_an_old_one(world, keep, [&](int rank, WatchedFiles& files) {
      files.reason = reason;
      if (rank == bad) files.fail_at = call;
    });
    const std::string failed = ranks[static_cast<std::size_t>(bad)].failed;
    CAPTURE(call, failed);
    REQUIRE(failed != "");
    // Once the new one is complete, what cannot be tidied up is a warning.
    const bool complete = ranks.front().message.empty();
    const bool tidying =
        keep == 1 &&
        (failed.starts_with("list") || failed.find(".removing") != std::string::npos ||
         failed.find("generation-1") != std::string::npos || failed == "fsync of " + run_directory.string());
    for (const Seen& seen : ranks) {
      if (!complete) {
        CHECK(seen.message.find("rank " + std::to_string(bad) + ": ") != std::string::npos);
        CHECK(seen.message.find(reason) != std::string::npos);
      } else {
        CHECK((seen.message == "" && tidying));
      }
      // The last sync may fail when the new one has its name already: then the message says so.
      const bool told =
          seen.message.find("generation-2-iteration-20' is complete all the same") != std::string::npos;
      CHECK((seen.loaded == 20) == (complete || told));
      CHECK((seen.loaded == 10 || seen.loaded == 20));
      CHECK(seen.same);
      CHECK(seen.left == "");
    }
  }
}

TEST_CASE("A disk that is full after any number of bytes leaves the old checkpoint and tells every rank",
          "[checkpoint][host][B082]") {
  constexpr int world = 3;
  const int bad = GENERATE(0, 1, 2);
  const auto good = over_an_old_one(world, 0, [](int, WatchedFiles&) {});
  const std::int64_t all = good[static_cast<std::size_t>(bad)].bytes;
  for (const std::int64_t room :
       {std::int64_t{0}, std::int64_t{1}, std::int64_t{63}, std::int64_t{64}, all / 2, all - 1}) {
    CAPTURE(bad, room, all);
    const auto ranks = over_an_old_one(world, 0, [&](int rank, WatchedFiles& files) {
      if (rank == bad) files.room = room;
    });
    for (const Seen& seen : ranks) {
      CHECK(seen.message.find("rank " + std::to_string(bad) + ": ") != std::string::npos);
      CHECK(seen.message.find("No space left on device") != std::string::npos);
      CHECK(seen.loaded == 10);
      CHECK(seen.same);
      CHECK(seen.left == "");
    }
  }
}

TEST_CASE("No rank returns from a save before all shards and the manifest are there",
          "[checkpoint][host][B083]") {
  constexpr int world = 4;
  DurableFiles disk;
  const auto seen = on_ranks(world, [&](HostThreads comm) -> std::string {
    AdamEngine engine(std::move(comm));
    const bool slow = engine.optimizer.rank() == 3;
    engine.train(1);
    WatchedFiles files(disk);
    bool slept = false;
    files.before = [&](const std::string& call, const std::filesystem::path&) {
      if (!slow || call != "write" || slept) return;
      slept = true;
      std::this_thread::sleep_for(std::chrono::seconds(1));
    };
    const auto start = std::chrono::steady_clock::now();
    const auto report = ckpt::save(engine.optimizer, run_directory, {.files = &files}, {});
    if (std::chrono::steady_clock::now() - start < std::chrono::milliseconds(900)) return "returned early";
    std::string text;
    for (const auto& entry : disk.list(report.generation)) text += entry.name.string() + " ";
    return text;
  });
  for (const std::string& files : seen) {
    CHECK(files ==
          "manifest.json optimizer_pp-0-of-1_dp-0-of-4.safetensors optimizer_pp-0-of-1_dp-1-of-4.safetensors "
          "optimizer_pp-0-of-1_dp-2-of-4.safetensors optimizer_pp-0-of-1_dp-3-of-4.safetensors ");
  }
}

TEST_CASE("One rank without space makes all ranks throw, and there is no manifest",
          "[checkpoint][host][B083]") {
  constexpr int world = 4;
  DurableFiles disk;
  const auto messages = messages_of_ranks<so::CheckpointError>(world, [&](HostThreads comm) {
    AdamEngine engine(std::move(comm));
    engine.train(1);
    WatchedFiles files(disk);
    if (engine.optimizer.rank() == 2) files.room = 100;
    ckpt::save(engine.optimizer, run_directory, {.files = &files}, {});
  });
  CHECK(all_same(messages));
  CHECK(messages[0].find("rank 2: ") != std::string::npos);
  CHECK(messages[0].find("No space left on device") != std::string::npos);
  CHECK(disk.all_files("/").empty());
}

TEST_CASE("Ranks that save different iterations or texts all throw before anything is written",
          "[checkpoint][host][B083]") {
  constexpr int world = 4;
  const bool counters = GENERATE(true, false);
  CAPTURE(counters);
  DurableFiles disk;
  const auto messages = messages_of_ranks<so::CheckpointError>(world, [&](HostThreads comm) {
    AdamEngine engine(std::move(comm));
    const int rank = engine.optimizer.rank();
    engine.train(1);
    ckpt::SaveOptions options{.files = &disk};
    if (counters) {
      auto count = engine.optimizer.counters({});
      count.iteration += rank == 2 ? 1 : 0;
      engine.optimizer.set_counters(count, {});
    } else {
      options.extras["tag"] = rank == 2 ? "b" : "a";
    }
    ckpt::save(engine.optimizer, run_directory, options, {});
  });
  for (const std::string& message : messages) {
    CAPTURE(message);
    CHECK(message.find("ranks disagree") != std::string::npos);
    CHECK(message.find("rank 2") != std::string::npos);
  }
  CHECK(disk.operations().empty());
}

TEST_CASE("Ranks that save different texts are told which one, however long they are", "[checkpoint][host]") {
  constexpr int world = 3;
  const int how = GENERATE(0, 1, 2);
  CAPTURE(how);
  const std::string large(std::size_t{1} << 20, 'x');
  DurableFiles disk;
  const auto messages = messages_of_ranks<so::CheckpointError>(world, [&](HostThreads comm) {
    AdamEngine engine(std::move(comm));
    const bool here = engine.optimizer.rank() == 2;
    ckpt::SaveOptions options{.extras = {{"a", "1"}, {"sampler", large}}, .files = &disk};
    if (how == 0 && here) options.extras["sampler"].back() = 'y';
    if (how == 1 && here) options.extras["z"] = "more";
    // The same characters one behind the other.
    if (how == 2 && !here) options.extras = {{"a", "b, c: d"}};
    if (how == 2 && here) options.extras = {{"a", "b"}, {"c", "d"}};
    ckpt::save(engine.optimizer, run_directory, options, {});
  });
  const std::string told[] = {"rank 0 has extra 'sampler' of 1048576 bytes",
                              "rank 0 has nothing more, rank 2 has extra 'z' 'more'",
                              "rank 0 has extra 'a' 'b, c: d', rank 2 has extra 'a' 'b'"};
  for (const std::string& message : messages) {
    CAPTURE(message.substr(0, 1000));
    CHECK(message.find("ranks disagree: " + told[how]) != std::string::npos);
    CHECK(message.size() < 1000);
  }
  CHECK(disk.operations().empty());
}

TEST_CASE("Long texts that are the same on every rank do not cross the wire", "[checkpoint][host]") {
  DurableFiles disk;
  const auto exchanges = on_ranks(2, [&](HostThreads comm) {
    const auto log = std::make_shared<CallLog>();
    CheckpointEngine<WatchedAdam> engine(Watched<HostThreads>(std::move(comm), log));
    const ckpt::SaveOptions options{.extras = {{"sampler", std::string(std::size_t{1} << 20, 'x')}},
                                    .files = &disk};
    const std::int64_t before = log->count("exchange");
    ckpt::save(engine.optimizer, run_directory, options, {});
    return log->count("exchange") - before;
  });
  for (const std::int64_t count : exchanges) CHECK(count < 20);
}

TEST_CASE("A rank that saves alone gets an error after the deadline of its communicator, and writes nothing",
          "[checkpoint][host][B083]") {
  constexpr int world = 4;
  DurableFiles disk;
  std::vector<std::string> messages(world);
  std::atomic<bool> over = false;
  double seconds = 0;
  CHECK_THROWS_AS(HostThreads::run(
                      world,
                      [&](HostThreads comm) {
                        AdamEngine engine(std::move(comm));
                        if (engine.optimizer.rank() != 0) {
                          while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(5));
                          return;
                        }
                        const auto start = std::chrono::steady_clock::now();
                        try {
                          ckpt::save(engine.optimizer, run_directory, {.files = &disk}, {});
                        } catch (const so::CollectiveError& error) {
                          messages[0] = error.what();
                          seconds =
                              std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
                          over = true;
                          throw;
                        }
                        over = true;
                      },
                      std::chrono::milliseconds(1500)),
                  so::CollectiveError);
  CHECK(messages[0].find("rank 1, 2, 3, which did not come within 1500 ms") != std::string::npos);
  CHECK(seconds > 1.4);
  CHECK(seconds < 60);
  CHECK(disk.operations().empty());
}

TEST_CASE("The folder of a save may be missing, or be made by all ranks at once",
          "[checkpoint][host][B083]") {
  constexpr int world = 4;
  const bool all_make_it = GENERATE(false, true);
  CAPTURE(all_make_it);
  const std::filesystem::path root =
      std::filesystem::temp_directory_path() / ("shardopt-folder-" + std::to_string(getpid()));
  std::filesystem::remove_all(root);
  const std::filesystem::path folder = root / "deep" / "er";
  const auto loaded = on_ranks(world, [&](HostThreads comm) {
    AdamEngine engine(std::move(comm));
    engine.train(2);
    if (all_make_it) std::filesystem::create_directories(folder);
    ckpt::save(engine.optimizer, folder, {}, {});
    return ckpt::load(engine.optimizer, folder, {}, {}).iteration;
  });
  std::filesystem::remove_all(root);
  for (const std::int64_t iteration : loaded) CHECK(iteration == 2);
}
