// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/nccl_error.cuh>
#include <shardopt/core/error.hpp>

#include <nccl.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

namespace shardopt::inline v0::detail {

/// A communicator, which several objects and threads of the process may use: the first that gives it up does
/// so for all, once. It waits for calls of other threads with it, but not for long (`most_wait`).
class NcclCommunicator {
 public:
  /// The one object of a communicator, for as long as somebody uses it and it is not given up.
  [[nodiscard]] static std::shared_ptr<NcclCommunicator> of(ncclComm_t comm) {
    const std::shared_ptr<Registry>& all = registry();
    const std::lock_guard lock(all->mutex);
    std::weak_ptr<NcclCommunicator>& known = all->communicators[comm];
    std::shared_ptr<NcclCommunicator> result = known.lock();
    if (result == nullptr) {
      result = std::make_shared<NcclCommunicator>(comm);
      known = result;
    }
    return result;
  }

  explicit NcclCommunicator(ncclComm_t comm) : comm_(comm), registry_(registry()) {}
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;
  ~NcclCommunicator() {
    if (!gone()) forget();
  }

  /// Makes calls of NCCL, by `body(communicator)`. It is not given up meanwhile, unless they take longer than
  /// `most_wait`: then NCCL ends them with an error.
  /// @throws CollectiveError if it was given up before
  template <class Body>
  ncclResult_t call(const Body& body) {
    const Use use(*this);
    return body(comm_);
  }

  /// What NCCL says of it; "in progress" of one that was given up.
  [[nodiscard]] ncclResult_t status() {
    if (gone()) return ncclInProgress;
    try {
      ncclResult_t status = ncclSuccess;
      const ncclResult_t asked = call([&](ncclComm_t comm) { return ncclCommGetAsyncError(comm, &status); });
      return asked == ncclSuccess ? status : ncclInternalError;
    } catch (const CollectiveError&) {
      return ncclInProgress;
    }
  }

  /// Null once it was given up.
  [[nodiscard]] ncclComm_t native() const noexcept { return gone() ? nullptr : comm_; }
  /// Whether it was given up.
  [[nodiscard]] bool gone() const noexcept { return gone_.load(std::memory_order_acquire); }
  /// @throws CollectiveError if it was given up
  void require_alive() const {
    if (!gone()) return;
    const std::lock_guard lock(mutex_);
    throw CollectiveError(reason_);
  }

  /// Aborts it: what waits for a peer on the device ends. The first call counts.
  void abort(std::string_view reason) noexcept {
    if (leave_to_me(reason)) static_cast<void>(ncclCommAbort(comm_));
  }
  /// Destroys it, unless it was given up.
  void destroy() noexcept {
    if (leave_to_me("shardopt: the communicator was destroyed")) static_cast<void>(ncclCommDestroy(comm_));
  }

 private:
  /// All of this process.
  struct Registry {
    std::mutex mutex;
    std::map<ncclComm_t, std::weak_ptr<NcclCommunicator>> communicators;
  };
  [[nodiscard]] static const std::shared_ptr<Registry>& registry() {
    static const auto all = std::make_shared<Registry>();
    return all;
  }

  static constexpr std::chrono::seconds most_wait{1};

  /// One call under way.
  class Use {
   public:
    explicit Use(NcclCommunicator& of) : of_(of) {
      const std::lock_guard lock(of_.mutex_);
      if (of_.gone()) throw CollectiveError(of_.reason_);
      ++of_.uses_;
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    ~Use() {
      const std::lock_guard lock(of_.mutex_);
      if (--of_.uses_ == 0) of_.idle_.notify_all();
    }

   private:
    NcclCommunicator& of_;
  };

  /// Marks it as given up, and waits until no call is under way. A call enqueues, and takes microseconds; one
  /// that takes long waits for a peer while it connects, and only the abort can end it.
  [[nodiscard]] bool leave_to_me(std::string_view reason) noexcept {
    {
      std::unique_lock lock(mutex_);
      if (gone()) return false;
      try {
        reason_ = reason;
      } catch (...) {
        reason_.clear();
      }
      gone_.store(true, std::memory_order_release);
      idle_.wait_for(lock, most_wait, [&] { return uses_ == 0; });
    }
    forget();  // a new communicator may get the same address
    return true;
  }

  void forget() noexcept {
    std::shared_ptr<NcclCommunicator>
        other;  // goes after the lock: it may be the last one's, which forgets itself
    const std::lock_guard lock(registry_->mutex);
    const auto known = registry_->communicators.find(comm_);
    if (known == registry_->communicators.end()) return;
    other = known->second.lock();
    if (other == nullptr || other.get() == this) registry_->communicators.erase(known);
  }

  ncclComm_t comm_;
  mutable std::mutex mutex_;
  std::condition_variable idle_;
  int uses_ = 0;
  std::atomic<bool> gone_{false};
  std::string reason_;
  std::shared_ptr<Registry> registry_;  ///< one of static storage may outlive that of registry()
};

}  // namespace shardopt::inline v0::detail
