// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "failure.hpp"
#include "options.hpp"
#include "progress.hpp"
#include "report.hpp"
#include "run.hpp"
#include "settings.hpp"

#include <shardopt/checkpoint.hpp>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <string>
#include <utility>

namespace mlp {

/// Saves a rank's part of the run, and finds where a run before it ended. All calls are collective.
template <class Optimizer>
class Checkpoints {
 public:
  using Stream = typename Optimizer::Stream;

  /// @param settings  what a run that goes on must have in common with the one that was saved
  Checkpoints(const Run& run, Optimizer& optimizer, Stream stream, Settings settings)
      : run_(run), optimizer_(optimizer), stream_(stream), settings_(std::move(settings)) {}

  /// Goes on where the newest whole checkpoint was saved, if that is wanted and there is one.
  /// @return iterations that are done
  /// @throws Told with exit code 2 if there are checkpoints, and none can be used, or that is not wanted
  int begin() {
    const std::string& directory = run_.options.checkpoint_dir;
    if (directory.empty()) return 0;
    const bool found = any();
    if (run_.options.resume && found) return resume();
    if (found)
      fail("'" + directory + "' holds checkpoints: --resume goes on, a new training needs its own folder", 2);
    if (run_.options.resume) tell("there is no checkpoint in '" + directory + "': the training starts anew");
    return 0;
  }

  /// Whether to save behind an iteration.
  [[nodiscard]] bool due(int iteration) const {
    const Options& options = run_.options;
    if (options.checkpoint_dir.empty()) return false;
    return iteration == run_.last_iteration() ||
           (options.save_every > 0 && iteration % options.save_every == 0);
  }

  /// Begins to save what stands behind an iteration; it is written while the training goes on. Between two
  /// steps: the micro-batches of a step are never parted.
  /// @throws Told with exit code 1 if that fails, or the save before has failed: a full disk
  void save(int iteration) {
    finish();
    shardopt::checkpoint::SaveOptions options{.keep = run_.options.keep, .extras = state_of(iteration)};
    const double seconds = run_.options.deadline.value_or(600.0);
    if (seconds > 0) options.timeout = std::chrono::milliseconds(std::llround(std::ceil(1000 * seconds)));
    or_fail([&] { saver_.save(optimizer_, run_.options.checkpoint_dir, options, stream_); });
  }

  /// Waits until the last save is complete, and tells it.
  /// @throws Told with exit code 1 if it has failed
  void finish() {
    or_fail([&] {
      const auto report = saver_.wait(optimizer_);
      if (!report) return;
      for (const std::string& warning : report->warnings) tell(warning);
      tell("saved " + report->generation.filename().string() + " (" + mebibytes(report->bytes) +
           " on this rank)");
    });
  }

 private:
  void tell(const std::string& what) const {
    if (optimizer_.rank() == 0) say(one_line(what));
  }

  /// Ends the run on every rank. No rank ends before rank 0 has told why.
  [[noreturn]] void fail(const std::string& why, int code) {
    tell(why);
    static_cast<void>(optimizer_.exchange(""));
    throw Told(why, code);
  }

  template <class Work>
  void or_fail(const Work& work) {
    try {
      work();
    } catch (const shardopt::CheckpointError& error) {  // on every rank
      fail(error.what(), 1);
    }
  }

  /// What is saved beside the optimizer.
  [[nodiscard]] Settings state_of(int iteration) const {
    Settings state = settings_;
    state["iteration"] = std::to_string(iteration);  // the position in the order of samples and the schedule
    return state;
  }

  /// Whether there is a complete checkpoint, by rank 0.
  bool any() {
    std::string found = "yes";
    if (optimizer_.rank() == 0) {
      try {
        const auto& files = shardopt::checkpoint::PosixFiles::instance();
        if (shardopt::checkpoint::generations(run_.options.checkpoint_dir, files).empty()) found.clear();
      } catch (const shardopt::CheckpointError&) {  // load() tells it
      }
    }
    return !optimizer_.exchange(found)[0].empty();
  }

  int resume() {
    const shardopt::checkpoint::LoadReport report = load();
    const std::string name = report.generation.filename().string();
    const std::string differences =
        differences_of(report.extras, state_of(static_cast<int>(report.iteration)));
    if (!differences.empty()) fail(name + " is of another training: " + differences, 2);
    if (report.iteration > run_.last_iteration()) {
      fail(name + " has more iterations than this run would have, " + std::to_string(run_.last_iteration()),
           2);
    }
    for (const std::string& note : report.notes) tell(name + ": " + note);
    tell("resumed " + name + ", saved by " + std::to_string(report.world) +
         (report.world == 1 ? " rank" : " ranks"));
    return static_cast<int>(report.iteration);
  }

  /// Loads the newest checkpoint; if it is damaged, the newest that is whole.
  shardopt::checkpoint::LoadReport load() {
    std::filesystem::path path = run_.options.checkpoint_dir;
    for (;;) {
      try {
        return shardopt::checkpoint::load(optimizer_, path, {}, stream_);
      } catch (const shardopt::CheckpointError& error) {
        if (error.alternative().empty()) fail(error.what(), 2);
        tell(error.what());
        path = error.alternative();
      }
    }
  }

  const Run& run_;
  Optimizer& optimizer_;
  Stream stream_;
  Settings settings_;
  shardopt::checkpoint::AsyncSaver saver_;
};

}  // namespace mlp
