// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstdint>
#include <future>
#include <mutex>
#include <optional>
#include <utility>

namespace shardopt::inline v0::checkpoint::detail {

/// A thread that does numbered pieces of work in their order, each after it was released, up to the first
/// that fails. Where no thread can start, finish() does it all.
class Follower {
 public:
  /// @param work  is called with 0, 1, …; returns whether it succeeded
  template <class Work>
  explicit Follower(Work work)
      : thread_(std::async(std::launch::async | std::launch::deferred, [this, work = std::move(work)] {
          for (std::int64_t piece = 0; is_released(piece); ++piece) {
            if (!work(piece)) return fail(piece);
          }
        })) {}
  Follower(const Follower&) = delete;
  Follower& operator=(const Follower&) = delete;
  ~Follower() { end(); }

  /// Lets the thread do one more. Returns false if a piece has failed.
  bool release() {
    {
      const std::lock_guard lock(mutex_);
      if (failed_) return false;
      ++released_;
    }
    changed_.notify_one();
    return true;
  }

  /// Returns when all that was released is done, with the piece that failed if one did.
  [[nodiscard]] std::optional<std::int64_t> finish() {
    end();
    thread_.get();
    return failed_;
  }

 private:
  /// Waits until the piece is released, or none will be any more.
  [[nodiscard]] bool is_released(std::int64_t piece) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return piece < released_ || ended_; });
    return piece < released_;
  }

  void fail(std::int64_t piece) {
    const std::lock_guard lock(mutex_);
    failed_ = piece;
  }

  void end() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_one();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t released_ = 0;
  bool ended_ = false;
  std::optional<std::int64_t> failed_;
  std::future<void> thread_;  ///< the last member: it uses the others, and its destructor waits
};

}  // namespace shardopt::inline v0::checkpoint::detail
