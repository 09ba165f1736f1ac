// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace mlp {

/// What ranks that are threads share beside the optimizer's traffic: their reports, and who has failed, so
/// that nobody is left waiting.
class Team {
 public:
  explicit Team(int ranks) : reports_(static_cast<std::size_t>(ranks)), ranks_(ranks) {}

  /// Called once, by the first rank that fails.
  std::function<void(const std::exception_ptr&)> on_failure = [](const std::exception_ptr&) {};

  /// Runs a rank's work and notes what it throws, for rethrow_failure().
  /// @return whether it ended well
  template <class Work>
  bool run(const Work& work) {
    try {
      work();
      return true;
    } catch (...) {
      fail(std::current_exception());
      return false;
    }
  }

  /// Waits until all ranks are here.
  /// @throws std::runtime_error if one of them has failed
  void meet() {
    std::unique_lock lock(mutex_);
    const std::size_t meeting = meetings_;
    if (++waiting_ == ranks_) {
      waiting_ = 0;
      ++meetings_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return failure_ != nullptr || meetings_ != meeting; });
    if (failure_ != nullptr) throw std::runtime_error("another rank has failed");
  }

  /// Prints what each rank has to say, in order of ranks.
  void print_in_order(int rank, std::string text) {
    reports_[static_cast<std::size_t>(rank)] = std::move(text);
    meet();
    if (rank != 0) return;
    for (const std::string& report : reports_) std::fputs(report.c_str(), stdout);
    std::fflush(stdout);
  }

  /// Throws what the first failed rank threw, if one did.
  void rethrow_failure() const {
    const std::lock_guard lock(mutex_);
    if (failure_ != nullptr) std::rethrow_exception(failure_);
  }

 private:
  void fail(const std::exception_ptr& failure) {
    {
      const std::lock_guard lock(mutex_);
      if (failure_ != nullptr) return;
      failure_ = failure;
    }
    changed_.notify_all();
    on_failure(failure);
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> reports_;
  int ranks_;
  int waiting_ = 0;
  std::size_t meetings_ = 0;
  std::exception_ptr failure_;
};

}  // namespace mlp
