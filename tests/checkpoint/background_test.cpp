// SPDX-License-Identifier: Apache-2.0
#include <pthread.h>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <shardopt/checkpoint.hpp>
#include <support/scratch_files.hpp>
#include <support/small_engine.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

using namespace test;
namespace checkpoint = so::checkpoint;
using namespace std::chrono_literals;

namespace {

using BackgroundOptimizer = ThreadsOptimizer<so::AdamW, so::Mixed<so::bf16, float, float>>;

/// An optimizer whose exchanges are watched.
class WatchedOptimizer : public BackgroundOptimizer {
 public:
  using BackgroundOptimizer::BackgroundOptimizer;
  std::function<void()> before_exchange = [] {};
  std::function<void()> after_exchange = [] {};

  [[nodiscard]] std::vector<std::string> exchange(const std::string& mine) {
    before_exchange();
    auto all = BackgroundOptimizer::exchange(mine);
    after_exchange();
    return all;
  }
};

/// Sets the stack that new threads of the process get; nothing else makes std::thread fail at a wanted time.
void set_stack_bytes(std::size_t bytes) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, bytes);
  pthread_setattr_default_np(&attributes);
  pthread_attr_destroy(&attributes);
}

/// Files of tensors are written only while the gate is open, and fail where they are told to.
class Gate : public QuickFiles {
 public:
  std::atomic<bool> open_gate = true;
  std::atomic<int> failing_rank = -1;
  std::atomic<int> silent_rank = -1;  ///< whose part never appears
  std::atomic<unsigned> held = 0;     ///< a bit for each rank whose file waits

  class GatedFile : public File {
   public:
    GatedFile(std::unique_ptr<checkpoint::WritableFile> file, const Gate& gate, unsigned rank)
        : File(std::move(file)), gate_(gate), rank_(rank) {}
    void write_at(std::int64_t offset, std::span<const std::byte> bytes) override {
      while (!gate_.open_gate || (gate_.held >> rank_ & 1U) != 0) std::this_thread::sleep_for(1ms);
      File::write_at(offset, bytes);
    }

   private:
    const Gate& gate_;
    unsigned rank_;
  };

  [[nodiscard]] std::unique_ptr<checkpoint::WritableFile> create(const std::filesystem::path& path) override {
    const std::string name = path.filename().string();
    if (name.find("dp-" + std::to_string(failing_rank) + "-of") != std::string::npos)
      throw so::CheckpointError("shardopt: write of '" + path.string() + "': No space left on device");
    if (name.ends_with(".safetensors")) {
      const auto rank = static_cast<unsigned>(std::stoi(name.substr(name.find("dp-") + 3)));
      return std::make_unique<GatedFile>(QuickFiles::create(path), *this, rank);
    }
    return QuickFiles::create(path);
  }
  void rename(const std::filesystem::path& from, const std::filesystem::path& to) override {
    if (to.filename() == "part-" + std::to_string(silent_rank) + ".json") return;
    QuickFiles::rename(from, to);
  }
};

std::vector<float> all_states(BackgroundOptimizer& optimizer) {
  std::vector<float> states;
  for (const auto& full : optimizer.gather_state(0, {}))
    states.insert(states.end(), full.values.begin(), full.values.end());
  return states;
}

void train(Engine<BackgroundOptimizer>& engine, int steps) {
  for (int step = 0; step < steps; ++step) {
    engine.set_gradients([&](std::int64_t i) { return static_cast<double>(i % 11) - 5 + step; });
    engine.step();
  }
}

/// A rank that saves in the background.
struct Background {
  Background(HostThreads comm, const ScratchFolder& to, Gate& gate)
      : engine(table_of_sizes({2000}), {}, std::move(comm), 1), folder(to), files(gate) {}

  [[nodiscard]] int rank() const { return engine.optimizer.rank(); }
  void save(std::chrono::milliseconds timeout = 60s) {
    saver.save(engine.optimizer, folder.path(), {.timeout = timeout, .files = &files}, {});
  }
  /// @return why the save has failed, or nothing
  [[nodiscard]] std::string wait() {
    return message_of<so::CheckpointError>([&] { report = saver.wait(engine.optimizer); });
  }

  Engine<BackgroundOptimizer> engine;
  const ScratchFolder& folder;
  Gate& files;
  checkpoint::AsyncSaver saver = {};
  std::optional<checkpoint::SaveReport> report = {};
};

}  // namespace

TEST_CASE("What is saved in the background is the state at the call, whatever training does meanwhile",
          "[checkpoint][B086][host]") {
  const int world = GENERATE(1, 3);
  const ScratchFolder folder;
  Gate files;
  files.open_gate = false;
  const auto saved = on_ranks(world, [&](HostThreads comm) {
    Engine<BackgroundOptimizer> engine(table_of_sizes({700, 3, 256}), {}, std::move(comm), 1);
    checkpoint::AsyncSaver saver;
    train(engine, 10);
    const auto then = all_states(engine.optimizer);
    saver.save(engine.optimizer, folder.path(), {.files = &files}, {});
    const int busy = saver.busy() ? 1 : 0;
    train(engine, 5);
    const int none = checkpoint::generations(folder.path(), files).empty() ? 1 : 0;
    static_cast<void>(engine.optimizer.exchange(""));  // all have looked
    files.open_gate = true;
    const auto report = saver.wait(engine.optimizer);
    return std::tuple(then, busy, none, report ? report->iteration : -1,
                      saver.wait(engine.optimizer).has_value());
  });
  for (const auto& [states, busy, none, iteration, again] : saved) {
    CHECK(busy == 1);
    CHECK(none == 1);
    CHECK(iteration == 10);
    CHECK_FALSE(again);
  }
  const auto loaded = on_ranks(2, [&](HostThreads comm) {
    Engine<BackgroundOptimizer> engine(table_of_sizes({700, 3, 256}), {}, std::move(comm), 0);
    const auto report = checkpoint::load(engine.optimizer, folder.path(), {.files = &files}, {});
    return std::pair(all_states(engine.optimizer),
                     std::vector<std::int64_t>{report.iteration, engine.optimizer.counters({}).iteration});
  });
  CHECK(loaded[0].first == std::get<0>(saved[0]));
  CHECK(loaded[1].second == std::vector<std::int64_t>{10, 10});
}

TEST_CASE(
    "A background save that fails on one rank shows on every rank at the next call, and the next one works",
    "[checkpoint][B083][host]") {
  const bool next_save = GENERATE(true, false);
  const int failing = GENERATE(0, 2);
  const ScratchFolder folder;
  Gate files;
  const auto told = on_ranks(4, [&](HostThreads comm) {
    Engine<BackgroundOptimizer> engine(table_of_sizes({2000}), {}, std::move(comm), 1);
    checkpoint::AsyncSaver saver;
    const checkpoint::SaveOptions options{.timeout = 60s, .files = &files};
    train(engine, 1);
    saver.save(engine.optimizer, folder.path(), options, {});
    static_cast<void>(saver.wait(engine.optimizer));
    if (engine.optimizer.rank() == 0) files.failing_rank = failing;
    train(engine, 1);
    saver.save(engine.optimizer, folder.path(), options, {});
    const std::string message = message_of<so::CheckpointError>([&] {
      if (next_save) {
        saver.save(engine.optimizer, folder.path(), options, {});
      } else {
        static_cast<void>(saver.wait(engine.optimizer));
      }
    });
    static_cast<void>(engine.optimizer.exchange(""));
    const auto after_failure = checkpoint::generations(folder.path(), files).size();
    static_cast<void>(engine.optimizer.exchange(""));
    if (engine.optimizer.rank() == 0) files.failing_rank = -1;
    saver.save(engine.optimizer, folder.path(), options, {});
    static_cast<void>(saver.wait(engine.optimizer));
    return std::pair(message, after_failure);
  });
  for (const auto& [message, generations] : told) {
    CAPTURE(message);
    CHECK(message.find("rank " + std::to_string(failing) + ": ") != std::string::npos);
    CHECK(message.find("No space left on device") != std::string::npos);
    CHECK(message.find("iteration 2") != std::string::npos);
    CHECK(generations == 1);
  }
  CHECK(names_in(folder.path()) ==
        std::vector<std::string>{"generation-1-iteration-1", "generation-2-iteration-2"});
}

TEST_CASE("Who waits in vain for a rank in the background says so when its timeout has passed",
          "[checkpoint][host]") {
  const ScratchFolder folder;
  Gate files;
  files.silent_rank = 1;
  const auto told = on_ranks(3, [&](HostThreads comm) {
    Background rank(std::move(comm), folder, files);
    rank.save(300ms);
    return rank.wait();
  });
  for (const auto& message : told) {
    CAPTURE(message);
    CHECK(message.find("rank 1 has not written its file in time") != std::string::npos);
  }
  CHECK(checkpoint::generations(folder.path(), files).empty());
}

TEST_CASE("A rank that cannot start its thread fails the background save on every rank at once",
          "[checkpoint][host]") {
  constexpr int world = 3;
  const ScratchFolder folder;
  Gate files;
  pthread_attr_t usual;
  REQUIRE(pthread_getattr_default_np(&usual) == 0);
  std::size_t usual_bytes = 0;
  REQUIRE(pthread_attr_getstacksize(&usual, &usual_bytes) == 0);
  std::atomic<int> arrived = 0;  // at exchanges, of the ranks but 1
  const auto told = on_ranks(world, [&](HostThreads comm) {
    Engine<WatchedOptimizer> engine(table_of_sizes({2000}), {}, std::move(comm), 1);
    WatchedOptimizer& optimizer = engine.optimizer;
    checkpoint::AsyncSaver saver;
    int exchanges = 0;
    if (optimizer.rank() != 1) optimizer.before_exchange = [&] { ++arrived; };
    if (optimizer.rank() == 1) {
      // What a rank does between two exchanges it does when the others have done it.
      optimizer.before_exchange = [&] { set_stack_bytes(usual_bytes); };
      optimizer.after_exchange = [&] {
        ++exchanges;
        while (arrived < (world - 1) * (exchanges + 1)) std::this_thread::sleep_for(1ms);
        set_stack_bytes(std::size_t{1} << 60);
      };
    }
    const auto begin = std::chrono::steady_clock::now();
    const std::string message = message_of<so::CheckpointError>(
        [&] { saver.save(optimizer, folder.path(), {.timeout = 20s, .files = &files}, {}); });
    const int at_once = std::chrono::steady_clock::now() - begin < 10s ? 1 : 0;
    optimizer.after_exchange = [] {};
    static_cast<void>(optimizer.exchange(""));
    const auto left = names_in(folder.path()).size();
    saver.save(optimizer, folder.path(), {.files = &files}, {});
    return std::tuple(message, at_once, left, saver.wait(optimizer).has_value());
  });
  for (const auto& [message, at_once, left, saved] : told) {
    CAPTURE(message);
    CHECK(message.find("rank 1: Resource temporarily unavailable") != std::string::npos);
    CHECK(at_once == 1);
    CHECK(left == 0);
    CHECK(saved);
  }
  CHECK(names_in(folder.path()) == std::vector<std::string>{"generation-1-iteration-0"});
}

TEST_CASE("What a rank's own writing takes is no time that it has waited for others", "[checkpoint][host]") {
  const ScratchFolder folder;
  Gate files;
  files.held = 0b11;
  const auto told = on_ranks(2, [&](HostThreads comm) {
    Background rank(std::move(comm), folder, files);
    rank.save(1s);
    if (rank.rank() == 0) {
      std::this_thread::sleep_for(1200ms);
      files.held = 0b10;
      std::this_thread::sleep_for(200ms);
      files.held = 0;
    }
    return rank.wait();
  });
  CHECK(told == std::vector<std::string>(2));
  CHECK(checkpoint::generations(folder.path(), files).size() == 1);
}

TEST_CASE("A generation that rank 0 completed is saved, also for a rank that did not wait for it",
          "[checkpoint][host]") {
  const ScratchFolder folder;
  Gate files;
  files.held = 0b01;
  const auto reports = on_ranks(3, [&](HostThreads comm) {
    Background rank(std::move(comm), folder, files);
    rank.save(rank.rank() == 1 ? 10ms : 60s);
    if (rank.rank() == 1) {
      while (rank.saver.busy()) std::this_thread::sleep_for(1ms);
      files.held = 0;
    }
    const std::string message = rank.wait();
    return std::pair(message, rank.report);
  });
  for (const auto& [message, report] : reports) {
    CHECK(message == "");
    REQUIRE(report);
    CHECK(std::filesystem::exists(report->generation));
  }
  CHECK(reports[0].second->warnings.empty());
  CHECK(reports[1].second->warnings == std::vector<std::string>{"rank 0 has not completed it in time"});
  CHECK(reports[2].second->warnings.empty());
}

TEST_CASE("A timeout is some time, and may be all time", "[checkpoint][host]") {
  const ScratchFolder folder;
  Gate files;
  const auto told = on_ranks(2, [&](HostThreads comm) {
    Background rank(std::move(comm), folder, files);
    std::vector<std::string> messages;
    for (const auto timeout : {0ms, -1ms})
      messages.push_back(message_of<std::invalid_argument>([&] { rank.save(timeout); }));
    if (rank.rank() == 0) files.held = 0b10;
    rank.save((std::chrono::milliseconds::max)());
    std::this_thread::sleep_for(100ms);
    files.held = 0;
    messages.push_back(rank.wait());
    return messages;
  });
  for (const auto& messages : told) {
    CHECK(messages[0].find("SaveOptions.timeout must be at least 1 ms") != std::string::npos);
    CHECK(messages[1].find("SaveOptions.timeout must be at least 1 ms") != std::string::npos);
    CHECK(messages[2] == "");
  }
}

TEST_CASE("What became of a background save is not lost where ranks cannot tell each other",
          "[checkpoint][host]") {
  const bool fails = GENERATE(false, true);
  const bool alone = GENERATE(false, true);
  CAPTURE(fails, alone);
  const ScratchFolder folder;
  Gate files;
  if (fails) files.failing_rank = 1;
  const auto told = on_ranks(2, [&](HostThreads comm) {
    Engine<WatchedOptimizer> engine(table_of_sizes({2000}), {}, std::move(comm), 1);
    checkpoint::AsyncSaver saver;
    saver.save(engine.optimizer, folder.path(), {.files = &files}, {});
    engine.optimizer.before_exchange = [] { throw std::runtime_error("a peer was lost"); };
    const std::string lost =
        message_of<std::runtime_error>([&] { static_cast<void>(saver.wait(engine.optimizer)); });
    if (!alone) engine.optimizer.before_exchange = [] {};
    std::optional<checkpoint::SaveReport> report;
    const std::string message = message_of<so::CheckpointError>(
        [&] { report = alone ? saver.wait_alone() : saver.wait(engine.optimizer); });
    return std::tuple(lost, message, report ? report->generation.filename().string() : "",
                      saver.wait_alone().has_value());
  });
  for (const auto& [lost, message, generation, again] : told) {
    CAPTURE(message);
    CHECK(lost == "a peer was lost");
    CHECK(message.empty() != fails);
    CHECK((message.find("No space left on device") != std::string::npos) == fails);
    CHECK(generation == (fails ? "" : "generation-1-iteration-0"));
    CHECK_FALSE(again);
  }
}

TEST_CASE("A saver that goes in the middle of a save ends it first", "[checkpoint][host]") {
  const ScratchFolder folder;
  Gate files;
  static_cast<void>(on_ranks(3, [&](HostThreads comm) {
    Background(std::move(comm), folder, files).save();
    return 0;
  }));
  CHECK(checkpoint::generations(folder.path(), files).size() == 1);
}

TEST_CASE("A save where another is still written in the background is refused, and harms neither",
          "[checkpoint][host]") {
  const ScratchFolder folder;
  Gate files;
  files.open_gate = false;
  // A save that is not refused must end, too.
  const auto opening = std::async(std::launch::async, [&] {
    for (int ms = 0; ms < 5000 && !files.open_gate; ++ms) std::this_thread::sleep_for(1ms);
    files.open_gate = true;
  });
  const auto told = on_ranks(3, [&](HostThreads comm) {
    Background rank(std::move(comm), folder, files);
    rank.save(20s);
    checkpoint::AsyncSaver other;
    const auto refusal = [&](const auto& save) { return message_of<so::CheckpointError>(save); };
    const std::string in_front =
        refusal([&] { checkpoint::save(rank.engine.optimizer, folder.path(), {.files = &files}, {}); });
    const std::string behind = refusal(
        [&] { other.save(rank.engine.optimizer, folder.path(), {.timeout = 20s, .files = &files}, {}); });
    files.open_gate = true;
    const std::string failure = rank.wait();
    checkpoint::save(rank.engine.optimizer, folder.path(), {.files = &files}, {});
    return std::tuple(in_front, behind, failure);
  });
  for (const auto& [in_front, behind, failure] : told) {
    CAPTURE(in_front, behind, failure);
    CHECK(in_front.find("call AsyncSaver::wait() before") != std::string::npos);
    CHECK(behind.find("call AsyncSaver::wait() before") != std::string::npos);
    CHECK(failure.empty());
  }
  const auto found = checkpoint::generations(folder.path(), files);
  REQUIRE(found.size() == 2);
  for (const auto& generation : found)
    CHECK(checkpoint::verify(checkpoint::Checkpoint(generation.path)).empty());
}

TEST_CASE("What another process is writing loses its name before any of it is removed",
          "[checkpoint][host]") {
  class Names : public QuickFiles {
   public:
    std::vector<std::string> removed;
    void remove(const std::filesystem::path& path) override {
      removed.push_back(path.filename().string());
      QuickFiles::remove(path);
    }
  };
  const ScratchFolder folder;
  Names files;
  std::filesystem::create_directory(folder / ".saving-1-0123456789abcdef");
  static_cast<void>(on_ranks(1, [&](HostThreads comm) {
    Engine<BackgroundOptimizer> engine(table_of_sizes({20}), {}, std::move(comm), 1);
    checkpoint::save(engine.optimizer, folder.path(), {.files = &files}, {});
    return 0;
  }));
  CHECK(std::find(files.removed.begin(), files.removed.end(), ".saving-1-0123456789abcdef") ==
        files.removed.end());
  CHECK(names_in(folder.path()) == std::vector<std::string>{"generation-1-iteration-0"});
}

TEST_CASE("Saving and loading in the middle of a step is refused on every rank", "[checkpoint][B092][host]") {
  const ScratchFolder folder;
  QuickFiles files;
  const auto told = on_ranks(3, [&](HostThreads comm) {
    Engine<BackgroundOptimizer> engine(table_of_sizes({2000}), {}, std::move(comm), 1);
    checkpoint::save(engine.optimizer, folder.path(), {.files = &files}, {});
    engine.optimizer.gradient_ready(so::ParameterId{0}, {});
    checkpoint::AsyncSaver saver;
    std::vector<std::string> messages;
    messages.push_back(message_of<std::logic_error>(
        [&] { checkpoint::save(engine.optimizer, folder.path(), {.files = &files}, {}); }));
    messages.push_back(message_of<std::logic_error>(
        [&] { saver.save(engine.optimizer, folder.path(), {.files = &files}, {}); }));
    messages.push_back(message_of<std::logic_error>(
        [&] { checkpoint::load(engine.optimizer, folder.path(), {.files = &files}, {}); }));
    engine.step();
    checkpoint::save(engine.optimizer, folder.path(), {.files = &files}, {});
    return messages;
  });
  for (const auto& messages : told) {
    for (const auto& message : messages) {
      CAPTURE(message);
      CHECK(message.find("in the middle of a step") != std::string::npos);
    }
  }
  CHECK(checkpoint::generations(folder.path(), files).size() == 2);
}

TEST_CASE("Hyper-parameters come back as saved, or stay as configured; changes are noted",
          "[checkpoint][host]") {
  const bool keep = GENERATE(false, true);
  const ScratchFolder folder;
  QuickFiles files;
  const auto seen = on_ranks(2, [&](HostThreads comm) {
    BackgroundOptimizer::Config config{.groups = {{"default", {.lr = 0.5, .weight_decay = 0.25}}}};
    {
      Engine<BackgroundOptimizer> engine(table_of_sizes({700}), config, comm.borrow(), 1);
      checkpoint::save(engine.optimizer, folder.path(),
                       {.extras = {{"schedule", "cosine at 7"}}, .files = &files}, {});
    }
    config.groups[0].rule.lr = 0.125;
    Engine<BackgroundOptimizer> engine(table_of_sizes({700}), config, std::move(comm), 1);
    const auto report = checkpoint::load(engine.optimizer, folder.path(),
                                         {.keep_hyper_parameters = keep, .files = &files}, {});
    return std::tuple(engine.optimizer.rule("default").lr, report.notes, report.extras.at("schedule"));
  });
  for (const auto& [lr, notes, schedule] : seen) {
    CHECK(lr == (keep ? 0.125 : 0.5));
    CHECK(schedule == "cosine at 7");
    if (keep) {
      CHECK(notes.empty());
    } else {
      CHECK(notes == std::vector<std::string>{"group 'default': lr is 0.5, as when it was saved, not 0.125"});
    }
  }
}
