// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <shardopt/checkpoint.hpp>
#include <support/scratch_files.hpp>
#include <support/small_engine.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using namespace test;
namespace checkpoint = so::checkpoint;
using namespace std::chrono_literals;

namespace {

using Optimizer = ThreadsOptimizer<so::AdamW, so::Mixed<so::bf16, float, float>>;

/// Files of tensors are written only while the gate is open, and fail where they are told to.
class Gate : public QuickFiles {
 public:
  std::atomic<bool> open_gate = true;
  std::atomic<int> failing_rank = -1;
  std::atomic<int> silent_rank = -1;  ///< whose part never appears

  class GatedFile : public File {
   public:
    GatedFile(std::unique_ptr<checkpoint::WritableFile> file, const Gate& gate)
        : File(std::move(file)), gate_(gate) {}
    void write_at(std::int64_t offset, std::span<const std::byte> bytes) override {
      while (!gate_.open_gate) std::this_thread::sleep_for(1ms);
      File::write_at(offset, bytes);
    }

   private:
    const Gate& gate_;
  };

  [[nodiscard]] std::unique_ptr<checkpoint::WritableFile> create(const std::filesystem::path& path) override {
    const std::string name = path.filename().string();
    if (name.find("dp-" + std::to_string(failing_rank) + "-of") != std::string::npos)
      throw so::CheckpointError("shardopt: write of '" + path.string() + "': No space left on device");
    if (name.ends_with(".safetensors")) return std::make_unique<GatedFile>(QuickFiles::create(path), *this);
    return QuickFiles::create(path);
  }
  void rename(const std::filesystem::path& from, const std::filesystem::path& to) override {
    if (to.filename() == "part-" + std::to_string(silent_rank) + ".json") return;
    QuickFiles::rename(from, to);
  }
};

std::vector<float> all_states(Optimizer& optimizer) {
  std::vector<float> states;
  for (const auto& full : optimizer.gather_state(0, {}))
    states.insert(states.end(), full.values.begin(), full.values.end());
  return states;
}

void train(Engine<Optimizer>& engine, int steps) {
  for (int step = 0; step < steps; ++step) {
    engine.set_gradients([&](std::int64_t i) { return static_cast<double>(i % 11) - 5 + step; });
    engine.step();
  }
}

}  // namespace

TEST_CASE("What is saved in the background is the state at the call, whatever training does meanwhile",
          "[checkpoint][B086][host]") {
  const int world = GENERATE(1, 3);
  const ScratchFolder folder;
  Gate files;
  files.open_gate = false;
  const auto saved = on_ranks(world, [&](HostThreads comm) {
    Engine<Optimizer> engine(table_of_sizes({700, 3, 256}), {}, std::move(comm), 1);
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
    Engine<Optimizer> engine(table_of_sizes({700, 3, 256}), {}, std::move(comm), 0);
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
  const ScratchFolder folder;
  Gate files;
  const auto told = on_ranks(4, [&](HostThreads comm) {
    Engine<Optimizer> engine(table_of_sizes({2000}), {}, std::move(comm), 1);
    checkpoint::AsyncSaver saver;
    const checkpoint::SaveOptions options{.timeout = 60s, .files = &files};
    train(engine, 1);
    saver.save(engine.optimizer, folder.path(), options, {});
    static_cast<void>(saver.wait(engine.optimizer));
    if (engine.optimizer.rank() == 0) files.failing_rank = 2;
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
    CHECK(message.find("rank 2: ") != std::string::npos);
    CHECK(message.find("No space left on device") != std::string::npos);
    CHECK(message.find("iteration 2") != std::string::npos);
    CHECK(generations == 1);
  }
  std::vector<std::string> left;
  for (const auto& entry : files.list(folder.path())) left.push_back(entry.name.string());
  std::sort(left.begin(), left.end());
  CHECK(left == std::vector<std::string>{"generation-1-iteration-1", "generation-2-iteration-2"});
}

TEST_CASE("Who waits in vain for a rank in the background says so when its timeout has passed",
          "[checkpoint][host]") {
  const ScratchFolder folder;
  Gate files;
  files.silent_rank = 1;
  const auto told = on_ranks(3, [&](HostThreads comm) {
    Engine<Optimizer> engine(table_of_sizes({2000}), {}, std::move(comm), 1);
    checkpoint::AsyncSaver saver;
    saver.save(engine.optimizer, folder.path(), {.timeout = 300ms, .files = &files}, {});
    return message_of<so::CheckpointError>([&] { static_cast<void>(saver.wait(engine.optimizer)); });
  });
  for (const auto& message : told) {
    CAPTURE(message);
    CHECK(message.find("rank 1 has not written its file in time") != std::string::npos);
  }
  CHECK(checkpoint::generations(folder.path(), files).empty());
}

TEST_CASE("A saver that goes in the middle of a save ends it first", "[checkpoint][host]") {
  const ScratchFolder folder;
  Gate files;
  static_cast<void>(on_ranks(3, [&](HostThreads comm) {
    Engine<Optimizer> engine(table_of_sizes({2000}), {}, std::move(comm), 1);
    checkpoint::AsyncSaver saver;
    saver.save(engine.optimizer, folder.path(), {.files = &files}, {});
    return 0;
  }));
  CHECK(checkpoint::generations(folder.path(), files).size() == 1);
}

TEST_CASE("Saving and loading in the middle of a step is refused on every rank", "[checkpoint][B092][host]") {
  const ScratchFolder folder;
  QuickFiles files;
  const auto told = on_ranks(3, [&](HostThreads comm) {
    Engine<Optimizer> engine(table_of_sizes({2000}), {}, std::move(comm), 1);
    checkpoint::save(engine.optimizer, folder.path(), {.files = &files}, {});
    engine.optimizer.gradient_ready(so::ParameterId{0}, {});
    checkpoint::AsyncSaver saver;
    std::vector<std::string> messages;
    messages.push_back(message_of<so::CheckpointError>(
        [&] { checkpoint::save(engine.optimizer, folder.path(), {.files = &files}, {}); }));
    messages.push_back(message_of<so::CheckpointError>(
        [&] { saver.save(engine.optimizer, folder.path(), {.files = &files}, {}); }));
    messages.push_back(message_of<so::CheckpointError>(
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
    Optimizer::Config config{.groups = {{"default", {.lr = 0.5, .weight_decay = 0.25}}}};
    {
      Engine<Optimizer> engine(table_of_sizes({700}), config, comm.borrow(), 1);
      checkpoint::save(engine.optimizer, folder.path(),
                       {.extras = {{"schedule", "cosine at 7"}}, .files = &files}, {});
    }
    config.groups[0].rule.lr = 0.125;
    Engine<Optimizer> engine(table_of_sizes({700}), config, std::move(comm), 1);
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
