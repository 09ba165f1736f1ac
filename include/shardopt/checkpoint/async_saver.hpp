// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/agreement.hpp>
#include <shardopt/checkpoint/background_saves.hpp>
#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/checkpoint/checkpointable.hpp>
#include <shardopt/checkpoint/commit.hpp>
#include <shardopt/checkpoint/device_reader.hpp>
#include <shardopt/checkpoint/folder_agreement.hpp>
#include <shardopt/checkpoint/save.hpp>
#include <shardopt/checkpoint/save_options.hpp>
#include <shardopt/core/range.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace shardopt::inline v0::checkpoint {

/// Saves in the background: the training loop is held only while this rank's states are copied to host
/// memory; a thread writes them. One object a rank, one save at a time: until it is written, other saves into
/// the same directory are refused, in the foreground or by another object.
///
/// A save that has failed shows at the next call, on every rank. Takes host memory of the size of this rank's
/// file until it is written, and 8 MiB of page-locked memory at the first save, which the optimizer keeps.
class AsyncSaver {
 public:
  AsyncSaver() = default;
  AsyncSaver(const AsyncSaver&) = delete;
  AsyncSaver& operator=(const AsyncSaver&) = delete;
  /// Waits until this rank's thread has ended, at most SaveOptions::timeout longer than its writing takes. A
  /// failure is lost: call wait() before.
  ~AsyncSaver() = default;

  /// Begins a save of the optimizer as it stands between two steps. The save before is waited for first.
  ///
  /// Collective; waits for what `stream` holds and for the copy.
  /// @param stream  the last step was made on
  /// @throws CheckpointError on every rank, as save() does, or for the save before; then none is begun
  template <Checkpointable Optimizer>
  void save(Optimizer& optimizer, const std::filesystem::path& directory, const SaveOptions& options,
            typename Optimizer::Stream stream) {
    static_cast<void>(wait(optimizer));
    auto job = std::make_unique<Job>(detail::begin_save(optimizer, directory, options, stream));
    try {
      detail::collectively(optimizer, job->save.failed(), [&] {
        job->take(optimizer, stream);
        job->start();
      });
    } catch (...) {
      job->save.clear_away();
      throw;
    }
    job->proceed(Turn::write);
    job_ = std::move(job);
  }

  /// Returns when the last save is complete on every rank; at once if none was begun since the last call.
  /// Collective; waits. @return what was saved, if a save was waited for
  /// @throws CheckpointError on every rank if it has failed; complete generations stay as they were. What
  /// `exchange` throws if ranks cannot tell each other: a further call tells what became of the save
  template <Checkpointable Optimizer>
  std::optional<SaveReport> wait(Optimizer& optimizer) {
    if (!job_) return std::nullopt;
    job_->join();
    const std::string failures = detail::told_failures(optimizer.exchange(job_->failure));
    return take_report(failures);
  }

  /// The same without the others, for a rank whose optimizer is broken: tells what this rank knows.
  /// Not collective; waits, also for others, at most SaveOptions::timeout longer than writing takes.
  /// @return what was saved, if a save was waited for: it is complete
  /// @throws CheckpointError if it has failed, or this rank gave up waiting for rank 0, which may complete it
  /// yet
  std::optional<SaveReport> wait_alone() {
    if (!job_) return std::nullopt;
    job_->join();
    return take_report(job_->failure.empty() ? job_->unseen : job_->failure);
  }

  /// Whether a save is being written by this rank, or waits for other ranks. Not collective; does not wait.
  [[nodiscard]] bool busy() const noexcept { return job_ && !job_->ended; }

 private:
  /// What a job's thread is to do.
  enum class Turn : int { wait, write, end };

  struct Job {
    explicit Job(detail::Save begun) : save(std::move(begun)) {
      report.generation = save.place.complete;
      report.iteration = save.manifest.iteration;
      // Rank 0 makes the next save's folder, and completes this one.
      if (save.rank == 0) unfinished.emplace(save.place.saving.filename().string());
    }
    ~Job() {
      proceed(Turn::end);
      join();
    }

    void join() {
      if (thread.joinable()) thread.join();
    }

    /// Copies this rank's states to host memory.
    template <class Optimizer>
    void take(Optimizer& optimizer, typename Optimizer::Stream stream) {
      const auto runs = optimizer.owned_states();
      snapshot = std::make_unique_for_overwrite<std::byte[]>(
          static_cast<std::size_t>(shardopt::detail::elements_of(runs)) * sizeof(float));
      detail::DeviceReader<typename Optimizer::Device> reader(optimizer.device(),
                                                              optimizer.transfer_memory());
      reader.read(runs, stream, [&](std::span<const std::byte> chunk) {
        std::memcpy(snapshot.get() + taken, chunk.data(), chunk.size());
        taken += chunk.size();
      });
    }

    /// Starts the thread. It touches no file before proceed(): ranks whose threads run would wait for one
    /// that got none.
    void start() {
      thread = std::thread([this] {
        turn.wait(Turn::wait);
        if (turn == Turn::write) run();
        unfinished.reset();
        ended = true;
      });
    }

    /// The first call counts.
    void proceed(Turn next) noexcept {
      Turn expected = Turn::wait;
      turn.compare_exchange_strong(expected, next);
      turn.notify_one();
    }

    void run() noexcept {
      const detail::FolderAgreement agreement(*save.files, save.place, save.manifest.world,
                                              save.options.timeout);
      failure = detail::failure_of([&] { write(); });
      if (!failure.empty()) {
        // What was written of it may be what fills the disk.
        static_cast<void>(
            detail::failure_of([&] { save.files->remove(save.place.saving / save.file_name()); }));
      } else if (save.rank == 0) {
        failure = detail::failure_of([&] { complete(agreement); });
      } else {
        unseen = detail::failure_of([&] { agreement.await_completion(); });
      }
      if (!failure.empty()) agreement.tell_failure(save.rank, failure);
    }

    void write() {
      report.bytes = save.write([&](const auto& sink) {
        constexpr std::size_t chunk = std::size_t{4} << 20;
        for (std::size_t at = 0; at < taken; at += chunk)
          sink(std::span<const std::byte>(snapshot.get() + at, (std::min)(chunk, taken - at)));
      });
      snapshot.reset();
    }

    void complete(const detail::FolderAgreement& agreement) {
      agreement.await_parts();
      detail::commit(*save.files, save.place, save.manifest);
      report.warnings = detail::prune(*save.files, save.place.directory, save.options.keep);
    }

    detail::Save save;
    std::unique_ptr<std::byte[]> snapshot;
    std::size_t taken = 0;
    SaveReport report = {};
    std::string failure;  ///< of this rank's work; of rank 0's: the generation is not complete
    std::string unseen;   ///< why this rank does not know that it is complete
    std::thread thread;
    std::atomic<Turn> turn = Turn::wait;
    std::atomic<bool> ended = false;
    std::optional<detail::BackgroundSaves::Entry> unfinished;  ///< on rank 0: until the thread ends
  };

  /// Ends the job. @param failures  nothing where the generation is complete
  SaveReport take_report(const std::string& failures) {
    const std::unique_ptr<Job> job = std::move(job_);
    if (!failures.empty()) throw CheckpointError("shardopt: " + job->save.failed() + ": " + failures);
    if (!job->unseen.empty()) job->report.warnings.push_back(job->unseen);
    return std::move(job->report);
  }

  std::unique_ptr<Job> job_;
};

}  // namespace shardopt::inline v0::checkpoint
