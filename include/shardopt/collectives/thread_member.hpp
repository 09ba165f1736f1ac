// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/blocks.hpp>
#include <shardopt/collectives/rendezvous.hpp>
#include <shardopt/core/error.hpp>

#include <chrono>
#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace shardopt::inline v0::detail {

/// One rank's place in a rendezvous: what all collectives between threads have in common. Move-only.
class ThreadMember {
 public:
  /// @param owns  whether the rank leaves with this object
  ThreadMember(std::shared_ptr<Rendezvous> shared, int rank, bool owns)
      : shared_(std::move(shared)), rank_(rank), owns_(owns) {}
  ThreadMember(ThreadMember&& other) noexcept
      : shared_(std::move(other.shared_)), rank_(other.rank_), owns_(std::exchange(other.owns_, false)) {}
  ThreadMember& operator=(ThreadMember&& other) noexcept {
    std::swap(shared_, other.shared_);
    std::swap(rank_, other.rank_);
    std::swap(owns_, other.owns_);
    return *this;
  }
  ThreadMember(const ThreadMember&) = delete;
  ThreadMember& operator=(const ThreadMember&) = delete;
  ~ThreadMember() {
    if (owns_ && shared_) shared_->leave(rank_);
  }

  /// One place a rank, in rank order. @throws std::invalid_argument unless world > 0
  [[nodiscard]] static std::vector<ThreadMember> make(int world, std::chrono::milliseconds deadline) {
    const auto shared = make_rendezvous(world, deadline);
    std::vector<ThreadMember> result;
    for (int rank = 0; rank < world; ++rank) result.emplace_back(shared, rank, true);
    return result;
  }

  /// Runs `body(ThreadMember)` on `world` threads, one a rank, and joins them. When a rank throws, the others
  /// get an error from where they wait.
  /// @throws what the first rank that failed threw: the first exception that is no CollectiveError, such as
  /// the others get, or else the first; std::system_error if the system gives no thread
  template <class Body>
  static void run(int world, const Body& body, std::chrono::milliseconds deadline) {
    const auto shared = make_rendezvous(world, deadline);
    std::mutex mutex;
    std::exception_ptr first;
    bool first_is_cause = false;
    const auto fail = [&](int rank, const std::string& text) {
      {
        const bool is_cause = !is_collective_error();
        const std::lock_guard lock(mutex);
        if (!first || (is_cause && !first_is_cause)) {
          first = std::current_exception();
          first_is_cause = is_cause;
        }
      }
      shared->abort("rank " + std::to_string(rank) + " failed" + text);
    };
    std::vector<std::thread> threads;
    const auto live = [&](int rank) {
      try {
        body(ThreadMember(shared, rank, false));
        shared->leave(rank);
      } catch (const std::exception& error) {
        fail(rank, std::string(": ") + error.what());
      } catch (...) {
        fail(rank, "");
      }
    };
    for (int rank = 0; rank < world; ++rank) {
      try {
        threads.emplace_back(live, rank);
      } catch (const std::exception& error) {  // those that run wait for those that never will
        fail(rank, std::string(", its thread could not be started: ") + error.what());
        break;
      }
    }
    for (std::thread& thread : threads) thread.join();
    if (first) std::rethrow_exception(first);
  }

  /// The same rank, for another user of it.
  [[nodiscard]] ThreadMember borrow() const { return {shared_, rank_, false}; }

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int world() const noexcept { return shared_->world(); }
  [[nodiscard]] Rendezvous& rendezvous() const noexcept { return *shared_; }

  void abort(std::string_view message) const {
    shared_->abort("rank " + std::to_string(rank_) + " failed: " + std::string(message));
  }

  /// All ranks post, `work` reads what others posted, all are done. None goes before, though it fails: others
  /// read its memory.
  template <class Work>
  void meet(const Rendezvous::Request& request, const Work& work) const {
    shared_->post(rank_, request);
    try {
      work();
    } catch (...) {
      shared_->done();
      throw;
    }
    shared_->done();
  }

  /// Host bytes of every rank to every rank.
  /// @throws std::invalid_argument unless `all` has room for all of them
  void exchange(std::span<const std::byte> mine, std::span<std::byte> all) const {
    require_room_for_all(mine.size(), all.size(), world(), "threads");
    meet({.operation = "exchange", .count = static_cast<std::int64_t>(mine.size()), .source = mine.data()},
         [&] {
           for (int rank = 0; rank < world() && !mine.empty(); ++rank) {
             std::memcpy(all.data() + static_cast<std::size_t>(rank) * mine.size(), shared_->of(rank).source,
                         mine.size());
           }
         });
  }

 private:
  /// Of the exception that is being handled.
  [[nodiscard]] static bool is_collective_error() {
    try {
      throw;
    } catch (const CollectiveError&) {
      return true;
    } catch (...) {
      return false;
    }
  }

  [[nodiscard]] static std::shared_ptr<Rendezvous> make_rendezvous(int world,
                                                                   std::chrono::milliseconds deadline) {
    if (world < 1) {
      throw std::invalid_argument("shardopt: a world needs at least one rank, got " + std::to_string(world));
    }
    return std::make_shared<Rendezvous>(world, deadline);
  }

  std::shared_ptr<Rendezvous> shared_;
  int rank_;
  bool owns_;
};

}  // namespace shardopt::inline v0::detail
