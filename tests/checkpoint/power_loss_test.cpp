// SPDX-License-Identifier: Apache-2.0
// Saves that are cut by a loss of power after each operation in turn, over what may then be on the disk.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <support/checkpoint_engine.hpp>
#include <support/durable_files.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

using namespace test;

namespace {

/// A run that saves now and then, and what it did to the disk.
struct Run {
  Disk start;
  std::vector<DiskOperation> operations;
  struct Saved {
    std::int64_t iteration;
    std::size_t begun;     ///< operations before save was called …
    std::size_t returned;  ///< … and when it had returned on every rank
  };
  std::vector<Saved> saves;
};

enum class How { at_once, in_the_background };

/// Trains two steps and saves, `saves` times.
[[nodiscard]] Run run_of(int world, std::int64_t saves, std::int64_t keep, How how = How::at_once) {
  DurableFiles files;
  Run run{.start = files.start(), .operations = {}, .saves = {}};
  static_cast<void>(on_ranks(world, [&](HostThreads comm) {
    AdamEngine engine(std::move(comm));
    for (std::int64_t k = 0; k < saves; ++k) {
      engine.train(2);
      const std::size_t begun = files.operations().size();
      if (how == How::in_the_background) {
        ckpt::AsyncSaver saver;
        saver.save(engine.optimizer, run_directory, {.keep = keep, .files = &files}, {});
        static_cast<void>(saver.wait(engine.optimizer));
      } else {
        ckpt::save(engine.optimizer, run_directory, {.keep = keep, .files = &files}, {});
      }
      static_cast<void>(engine.optimizer.exchange(""));
      if (engine.optimizer.rank() == 0)
        run.saves.push_back({engine.optimizer.counters({}).iteration, begun, files.operations().size()});
      static_cast<void>(engine.optimizer.exchange(""));
    }
    return 0;
  }));
  run.operations = files.operations();
  return run;
}

/// What is wrong with the generations that count as complete.
[[nodiscard]] std::string damage_in(const DurableFiles& files) {
  std::string text;
  for (const auto& generation : ckpt::generations(run_directory, files)) {
    text += message_of([&] {
      for (const auto& problem : ckpt::verify(ckpt::Checkpoint(generation.path, files)))
        text += problem + " ";
    });
    for (const auto& entry : files.list(generation.path)) {
      const std::string name = entry.name.string();
      if (name != "manifest.json" && !name.ends_with(".safetensors")) text += name + " ";
    }
  }
  return text;
}

/// Names of a directory that are no complete generation's, and what is wrong in those.
[[nodiscard]] std::string others_in(const DurableFiles& files) {
  std::string text;
  for (const auto& entry : files.list(run_directory)) {
    const std::string name = entry.name.string();
    if (!name.starts_with("generation-")) text += name + " ";
  }
  return text + damage_in(files);
}

/// What is wrong with a disk: loads, trains on, saves, looks again, and cuts the power once more.
/// @param possible  iterations one of which must load; 0: there may be none
[[nodiscard]] std::string faults_of(const Disk& disk, int world, const std::set<std::int64_t>& possible,
                                    const std::vector<Snapshot>& plain, std::int64_t keep) {
  DurableFiles files(disk);
  const std::string damage = damage_in(files);
  if (!damage.empty()) return "a generation counts as complete and is not: " + damage;
  const auto results = on_ranks(world, [&](HostThreads comm) -> std::string {
    AdamEngine engine(std::move(comm));
    std::int64_t loaded = 0;
    const std::string failure = message_of(
        [&] { loaded = ckpt::load(engine.optimizer, run_directory, {.files = &files}, {}).iteration; });
    const bool none = failure.find("there is no complete checkpoint in") != std::string::npos;
    if (!failure.empty() && !(none && possible.contains(0))) return failure;
    if (!possible.contains(loaded)) return "iteration " + std::to_string(loaded) + " was loaded";
    const Snapshot now = engine.snapshot();
    if (engine.optimizer.rank() == 0 && now != plain[static_cast<std::size_t>(loaded)])
      return "what was loaded is not iteration " + std::to_string(loaded);
    engine.train(1);
    const std::string failed =
        message_of([&] { ckpt::save(engine.optimizer, run_directory, {.keep = keep, .files = &files}, {}); });
    if (!failed.empty()) return failed;
    static_cast<void>(engine.optimizer.exchange(""));
    if (engine.optimizer.rank() != 0) return {};
    const std::string rest = others_in(files);
    if (!rest.empty()) return "after the next save there are: " + rest;
    const auto complete = ckpt::generations(run_directory, files);
    if (complete.back().iteration != loaded + 1) return "the next save is not the newest";
    if (keep > 0 && static_cast<std::int64_t>(complete.size()) > keep) return "too many are kept";
    return {};
  });
  for (const std::string& result : results) {
    if (!result.empty()) return result;
  }
  const auto operations = files.operations();
  const DurableFiles again(after_power_loss(files.start(), operations, operations.size(), {}));
  const auto complete = ckpt::generations(run_directory, again);
  if (complete.empty() || !ckpt::verify(ckpt::Checkpoint(complete.back().path, again)).empty() ||
      !possible.contains(complete.back().iteration - 1))
    return "the next save had returned, and was not on stable storage";
  return {};
}

/// Cuts a run after each operation, and says what goes wrong; nothing if all is well.
[[nodiscard]] std::string faults_of(const Run& run, std::int64_t keep, std::uint64_t seeds) {
  const auto plain = plain_run(run.saves.back().iteration + 1);
  std::set<std::pair<std::size_t, std::set<std::int64_t>>> seen;
  std::string text;
  for (std::size_t count = 0; count <= run.operations.size() && text.empty(); ++count) {
    std::set<std::int64_t> possible;  // the newest that had been saved, and what was being saved
    std::int64_t durable = 0;
    for (const auto& save : run.saves) {
      if (save.returned <= count) durable = save.iteration;
      if (save.begun < count && count < save.returned) possible.insert(save.iteration);
    }
    possible.insert(durable);
    for (std::uint64_t seed = 0; seed < seeds + 2 && text.empty(); ++seed) {
      const Survival survival{seed == 0   ? Survival::Kind::nothing
                              : seed == 1 ? Survival::Kind::everything
                                          : Survival::Kind::some,
                              seed};
      const Disk disk = after_power_loss(run.start, run.operations, count, survival);
      if (!seen.insert({std::hash<std::string>()(contents_of(disk)), possible}).second) continue;
      const std::string fault = faults_of(disk, 1 + static_cast<int>(seed % 3), possible, plain, keep);
      if (fault.empty()) continue;
      text = fault + "\nafter " + std::to_string(count) + " operations, survival " + std::to_string(seed) +
             ":\n";
      for (std::size_t k = 0; k < count; ++k) text += "  " + run.operations[k].text + "\n";
      text += "on the disk:\n";
      for (const auto& path : DurableFiles(disk).all_files("/")) text += "  " + path.string() + "\n";
    }
  }
  INFO(seen.size() << " disks of " << run.operations.size() << " operations");
  CHECK(seen.size() > run.operations.size() / 2);
  return text;
}

/// Kills a run after some of its operations, lets another process load and save, and cuts the power after
/// each operation of that.
[[nodiscard]] std::string faults_after_kill(const Run& run, std::size_t count, std::int64_t keep) {
  DurableFiles files(run.start,
                     {run.operations.begin(), run.operations.begin() + static_cast<std::ptrdiff_t>(count)});
  std::int64_t durable = 0;
  for (const auto& save : run.saves) durable = save.returned <= count ? save.iteration : durable;
  static_cast<void>(on_ranks(1, [&](HostThreads comm) {
    AdamEngine engine(std::move(comm));
    static_cast<void>(
        message_of([&] { ckpt::load(engine.optimizer, run_directory, {.files = &files}, {}); }));
    engine.train(1);
    ckpt::save(engine.optimizer, run_directory, {.keep = keep, .files = &files}, {});
    return 0;
  }));
  const auto operations = files.operations();
  for (std::size_t end = count; end <= operations.size(); ++end) {
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
      const auto kind = seed == 0 ? Survival::Kind::nothing : Survival::Kind::some;
      const DurableFiles left(after_power_loss(run.start, operations, end, {kind, seed}));
      const auto complete = ckpt::generations(run_directory, left);
      const std::string damage = damage_in(left);
      const std::int64_t newest = complete.empty() ? 0 : complete.back().iteration;
      if (damage.empty() && newest >= durable) continue;
      return "killed after " + std::to_string(count) + " operations, cut after " + std::to_string(end) +
             ", survival " + std::to_string(seed) + ": iteration " + std::to_string(newest) + " " + damage;
    }
  }
  return {};
}

}  // namespace

TEST_CASE("A save cut by a loss of power at any instant leaves the old or the new checkpoint whole",
          "[checkpoint][host][law8][B082]") {
  const int world = GENERATE(1, 3);
  const How how = GENERATE(How::at_once, How::in_the_background);
  CAPTURE(world, static_cast<int>(how));
  CHECK(faults_of(run_of(world, 3, 0, how), 0, 3) == "");
}

TEST_CASE("A save that keeps one generation leaves a whole one wherever the power goes",
          "[checkpoint][host][law8][B082]") {
  const int world = GENERATE(1, 3);
  const std::int64_t keep = GENERATE(1, 2);
  CAPTURE(world, keep);
  CHECK(faults_of(run_of(world, keep + 2, keep), keep, 3) == "");
}

TEST_CASE("What a killed process left is tidied up without harm if the power goes then",
          "[checkpoint][host][law8][B082]") {
  const Run run = run_of(2, 2, 1);
  for (std::size_t count = 0; count <= run.operations.size(); ++count)
    REQUIRE(faults_after_kill(run, count, 1) == "");
}

TEST_CASE("Saves are cut by losses of power in many more ways", "[checkpoint][host][law8][B082][full]") {
  const int world = GENERATE(1, 2, 4);
  const std::int64_t keep = GENERATE(0, 1, 2);
  CAPTURE(world, keep);
  CHECK(faults_of(run_of(world, keep + 2, keep), keep, 60) == "");
}
