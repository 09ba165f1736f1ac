// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/dtype.hpp>
#include <shardopt/core/error.hpp>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace shardopt::inline v0::detail {

/// Where the ranks of one process meet: each posts what it is about to do, all see that they agree, and go on
/// together.
///
/// When ranks disagree, when one fails (`abort`), or when one leaves while others wait, every rank gets the
/// same CollectiveError from its current and each later call: nobody waits for ever. But a rank whose memory
/// others read is not let go before they have read it, whatever fails meanwhile.
class Rendezvous {
 public:
  /// What a rank posts. Compared between ranks: all but the addresses.
  struct Request {
    std::string_view operation = {};
    Dtype type = Dtype::uint8;
    std::int64_t count = 0;
    int root = 0;
    std::uint64_t layout = 0;  ///< digest of what else must agree (block borders)
    void* data = nullptr;
    const void* source = nullptr;
  };

  /// @param deadline  the longest that ranks wait for another to come; 0: as long as it takes
  /// @throws std::invalid_argument for a negative deadline
  Rendezvous(int world, std::chrono::milliseconds deadline)
      : requests_(static_cast<std::size_t>(world)),
        here_(requests_.size(), false),
        left_(requests_.size(), false),
        deadline_((std::min)(deadline, longest_deadline)) {
    if (deadline.count() < 0) {
      throw std::invalid_argument("shardopt: a deadline cannot be negative, got " +
                                  std::to_string(deadline.count()) + " ms (0: no limit)");
    }
    const std::lock_guard lock(registry().mutex);
    registry().members.insert(this);
  }
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;
  ~Rendezvous() {
    const std::lock_guard lock(registry().mutex);
    registry().members.erase(this);
  }

  [[nodiscard]] int world() const noexcept { return static_cast<int>(requests_.size()); }

  /// Waits until all ranks have come. @throws CollectiveError on every rank if they disagree or one has
  /// failed
  void wait(int rank, const Request& request) { come(rank, request, false); }

  /// Posts and waits until all ranks have. Then done() must be called, whatever happens in between.
  /// @throws CollectiveError on every rank if they disagree or one has failed: then done() must not be called
  void post(int rank, const Request& request) { come(rank, request, true); }

  /// Says that this rank has done with what others posted, and waits until all have. Has no deadline: they
  /// are at work, and read this rank's memory.
  void done() {
    std::unique_lock lock(mutex_);
    const std::uint64_t mine = generation_;  // no other meeting can be complete before this rank comes to it
    if (--inside_ == 0) changed_.notify_all();
    changed_.wait(lock, [&] { return inside_ == 0 || generation_ != mine; });
  }

  /// What a rank posted. Valid between post() and done().
  [[nodiscard]] const Request& of(int rank) const noexcept {
    return requests_[static_cast<std::size_t>(rank)];
  }

  /// Tells every rank that one has failed. The first message stays.
  void abort(std::string_view message) {
    const std::lock_guard lock(mutex_);
    fail(std::string(message));
  }

  /// A rank goes for good. If others wait for it, or come to wait, they get an error.
  void leave(int rank) {
    const std::lock_guard lock(mutex_);
    left_[static_cast<std::size_t>(rank)] = true;
    if (waiting_ > 0) fail(text_of_departure(rank, waiting_for_));
  }

 private:
  /// All of this process: what waits elsewhere may be why ranks are missing here.
  struct Registry {
    std::mutex mutex;
    std::set<Rendezvous*> members;
  };
  /// Never destroyed: a rendezvous may have static storage and end after whatever this could be.
  [[nodiscard]] static Registry& registry() {
    static Registry& all = *new Registry;
    return all;
  }

  /// A hundred years: what is longer cannot be added to a time point.
  static constexpr std::chrono::milliseconds longest_deadline = std::chrono::hours(24 * 365 * 100);

  [[nodiscard]] static std::string text_of_departure(int rank, std::string_view operation) {
    return "rank " + std::to_string(rank) + " has left while others wait for it in " + std::string(operation);
  }

  /// @param enters  whether ranks go on to read what others posted, until done()
  void come(int rank, const Request& request, bool enters) {
    std::unique_lock lock(mutex_);
    throw_if_failed();
    for (std::size_t other = 0; other < left_.size(); ++other) {
      if (left_[other] && other != static_cast<std::size_t>(rank)) {
        fail(text_of_departure(static_cast<int>(other), request.operation));
      }
    }
    throw_if_failed();
    requests_[static_cast<std::size_t>(rank)] = request;
    waiting_for_ = request.operation;
    here_[static_cast<std::size_t>(rank)] = true;
    if (++waiting_ == world()) {
      compare_requests();
      throw_if_failed();  // before the others are let go: a rank that disagrees must write nothing
      waiting_ = 0;
      here_.assign(here_.size(), false);
      inside_ = enters ? world() : 0;
      ++generation_;
      changed_.notify_all();
    } else {
      wait_for_others(lock, request.operation);
    }
  }

  void wait_for_others(std::unique_lock<std::mutex>& lock, std::string_view operation) {
    const std::uint64_t mine = generation_;
    const auto over = [&] { return generation_ != mine || !failure_.empty(); };
    if (deadline_.count() == 0) {
      changed_.wait(lock, over);
    } else if (!changed_.wait_for(lock, deadline_, over)) {
      const std::string missing = text_of_missing(operation);
      lock.unlock();
      const std::string elsewhere = text_of_others();
      lock.lock();
      if (generation_ == mine) fail(missing + elsewhere);
    }
    if (generation_ == mine) throw_if_failed();  // else all had come before anything failed
  }

  [[nodiscard]] std::string text_of_ranks(bool here) const {
    std::string ranks;
    for (std::size_t rank = 0; rank < here_.size(); ++rank) {
      if (here_[rank] == here) ranks += (ranks.empty() ? "rank " : ", ") + std::to_string(rank);
    }
    return ranks;
  }

  [[nodiscard]] std::string text_of_missing(std::string_view operation) const {
    return text_of_ranks(true) + " wait in " + std::string(operation) + " for " + text_of_ranks(false) +
           ", which did not come within " + std::to_string(deadline_.count()) + " ms";
  }

  /// Who waits in other collectives of the process; those that are busy are left out.
  [[nodiscard]] std::string text_of_others() {
    std::string text;
    const std::lock_guard all(registry().mutex);
    for (Rendezvous* other : registry().members) {
      if (other == this) continue;
      const std::unique_lock lock(other->mutex_, std::try_to_lock);
      if (!lock.owns_lock() || other->waiting_ == 0) continue;
      text += "; elsewhere " + other->text_of_ranks(true) + " wait in " + std::string(other->waiting_for_) +
              " for " + other->text_of_ranks(false);
    }
    return text.empty() ? text : text + ": all ranks must use their collectives in one order";
  }

  void compare_requests() {
    for (std::size_t rank = 1; rank < requests_.size(); ++rank) {
      const Request& first = requests_[0];
      const Request& other = requests_[rank];
      if (first.operation == other.operation && first.type == other.type && first.count == other.count &&
          first.root == other.root && first.layout == other.layout) {
        continue;
      }
      fail("ranks call different collectives: rank 0 " + describe(first) + ", rank " + std::to_string(rank) +
           " " + describe(other));
      return;
    }
  }

  [[nodiscard]] static std::string describe(const Request& request) {
    return std::string(request.operation) + " of " + std::to_string(request.count) + " " +
           std::string(name_of(request.type)) + " (root " + std::to_string(request.root) + ", layout " +
           std::to_string(request.layout % 10000) + ")";
  }

  void fail(std::string message) {
    if (failure_.empty()) failure_ = "shardopt: " + std::move(message);
    changed_.notify_all();
  }

  void throw_if_failed() const {
    if (!failure_.empty()) throw CollectiveError(failure_);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Request> requests_;
  std::vector<bool> here_;  ///< has come to the meeting under way
  std::vector<bool> left_;
  std::chrono::milliseconds deadline_;
  std::string failure_;
  std::string_view waiting_for_;
  int waiting_ = 0;
  int inside_ = 0;  ///< ranks that may still read what others posted
  std::uint64_t generation_ = 0;
};

}  // namespace shardopt::inline v0::detail
