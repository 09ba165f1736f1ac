// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/nccl_error.cuh>
#include <shardopt/core/error.hpp>
#include <shardopt/devices/cuda.cuh>

#include <cuda_runtime.h>
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace shardopt::inline v0 {

/// How Nccl looks after a communicator.
struct NcclOptions {
  /// Greater than zero: a thread watches the communicator. It reports NCCL's asynchronous errors, and
  /// collectives that have not finished though none has for this long: choose more than the longest stretch
  /// of the engine's own work between two collectives. Joining is bounded by it too.
  std::chrono::milliseconds deadline{0};
  /// Whether a borrowed communicator may be aborted when it has failed: only that ends kernels that wait for
  /// a lost peer. One that the library made is aborted always. After an abort the engine must not use the
  /// communicator, nor destroy it.
  bool abort_borrowed = false;
};

namespace detail {

/// A communicator with its failure: the first one stays, and every later use reports it.
///
/// With a deadline a thread polls NCCL and the events behind enqueued collectives.
class NcclHandle {
 public:
  /// @param owns  whether the communicator is destroyed with this
  NcclHandle(ncclComm_t comm, bool owns, int rank, Cuda device, const NcclOptions& options)
      : comm_(comm), owns_(owns), rank_(rank), device_(device), options_(options) {
    if (options_.deadline.count() > 0) watcher_ = std::thread([this] { watch(); });
  }
  NcclHandle(const NcclHandle&) = delete;
  NcclHandle& operator=(const NcclHandle&) = delete;
  ~NcclHandle() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (watcher_.joinable()) watcher_.join();
    if (owns_ && !aborted_) static_cast<void>(ncclCommDestroy(comm_));
  }

  /// The communicator for a call. @throws CollectiveError if it has failed
  [[nodiscard]] ncclComm_t get() const {
    throw_if_failed();
    return comm_;
  }
  /// Whether a thread watches.
  [[nodiscard]] bool watched() const noexcept { return watcher_.joinable(); }

  /// Whether it has failed and was not aborted.
  [[nodiscard]] bool stuck() const noexcept {
    if (!failed_.load(std::memory_order_acquire)) return false;
    const std::lock_guard lock(mutex_);
    return !aborted_;
  }

  /// @throws CollectiveError with the first failure, if there was one
  void throw_if_failed() const {
    if (!failed_.load(std::memory_order_acquire)) return;
    const std::lock_guard lock(mutex_);
    throw CollectiveError(failure_);
  }

  /// Marks the communicator as failed, and aborts it where that is allowed. From any thread; the first call
  /// counts.
  void fail(const std::string& what) noexcept {
    {
      const std::lock_guard lock(mutex_);
      if (failed_) return;
      try {
        failure_ = "shardopt: rank " + std::to_string(rank_) + ": " + what;
      } catch (...) {
        failure_.clear();
      }
      failed_.store(true, std::memory_order_release);
      if (!owns_ && !options_.abort_borrowed) return;
      aborted_ = true;
    }
    const std::lock_guard lock(comm_mutex_);
    gone_ = true;
    static_cast<void>(ncclCommAbort(comm_));
  }

  /// What the next collectives belong to, for reports.
  void label(std::string text) {
    if (watched()) label_ = std::move(text);
  }

  /// A collective was enqueued on `stream`: watches for its end. Collectives in a capture run with each
  /// replay and are not watched.
  void track(cudaStream_t stream) {
    if (!watched() || Cuda::capture_of(stream) != 0) return;
    Cuda::Event event = take_event();
    device_.record(event, stream);
    const std::lock_guard lock(mutex_);
    if (pending_.empty()) progress_ = Clock::now();
    pending_.push_back({label_, std::move(event)});
  }

  /// NCCL's answer to a call; where it is still at work (a communicator that does not block), waits for it.
  /// @throws NcclError unless the call succeeded
  void settle(ncclResult_t status, const char* call, Location where = Location::current()) const {
    while (status == ncclInProgress) {
      throw_if_failed();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      status = asynchronous_status();
    }
    if (status == ncclSuccess) return;
    throw_if_failed();
    shardopt::throw_if_failed(status, call, comm_, where);
  }

  /// Waits for an event; if the communicator fails meanwhile, gives up.
  /// @throws CollectiveError, CudaError
  void wait(const Cuda::Event& event) const {
    if (!watched()) {
      device_.synchronize(event);
      return;
    }
    for (;;) {
      const cudaError_t status = query(event);
      throw_if_failed();
      if (status == cudaSuccess) return;
      if (status != cudaErrorNotReady) shardopt::throw_if_failed(status, "cudaEventQuery");
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

 private:
  using Clock = std::chrono::steady_clock;

  struct Pending {
    std::string label;
    Cuda::Event event;
  };

  /// "Not ready" is no error to leave behind for the engine's next look at cudaGetLastError.
  [[nodiscard]] static cudaError_t query(const Cuda::Event& event) {
    const cudaError_t before = cudaPeekAtLastError();
    const cudaError_t status = cudaEventQuery(event.get());
    if (status == cudaErrorNotReady && before == cudaSuccess) static_cast<void>(cudaGetLastError());
    return status;
  }

  /// What NCCL says of the communicator; "in progress" of one that another thread has given up meanwhile.
  [[nodiscard]] ncclResult_t asynchronous_status() const {
    const std::lock_guard lock(comm_mutex_);
    if (gone_) return ncclInProgress;
    ncclResult_t status = ncclSuccess;
    return ncclCommGetAsyncError(comm_, &status) == ncclSuccess ? status : ncclInternalError;
  }

  [[nodiscard]] Cuda::Event take_event() {
    {
      const std::lock_guard lock(mutex_);
      if (!spare_.empty()) {
        Cuda::Event event = std::move(spare_.back());
        spare_.pop_back();
        return event;
      }
    }
    return device_.make_event();
  }

  void watch() {
    static_cast<void>(cudaSetDevice(device_.ordinal()));
    cudaStreamCaptureMode mode =
        cudaStreamCaptureModeRelaxed;  // queries here must not end another thread's capture
    static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
    std::unique_lock lock(mutex_);
    while (!stopping_ && !failed_) {
      changed_.wait_for(lock, std::chrono::milliseconds(20));
      if (stopping_ || failed_) return;
      const std::string reason = collect(lock);
      if (reason.empty()) continue;
      const std::string oldest =
          pending_.empty() ? "nothing was under way" : pending_.front().label + " has not finished";
      lock.unlock();
      fail(oldest + "; " + reason);
      lock.lock();
    }
  }

  /// Drops what has finished. @return what is wrong, or nothing
  [[nodiscard]] std::string collect(std::unique_lock<std::mutex>& lock) {
    lock.unlock();
    const ncclResult_t status = asynchronous_status();
    lock.lock();
    while (!pending_.empty() && cudaEventQuery(pending_.front().event.get()) != cudaErrorNotReady) {
      spare_.push_back(std::move(pending_.front().event));
      pending_.pop_front();
      progress_ = Clock::now();
    }
    if (status != ncclSuccess && status != ncclInProgress) {
      return std::string("NCCL reports: ") + ncclGetErrorString(status);
    }
    if (!pending_.empty() && Clock::now() - progress_ > options_.deadline) {
      return "no collective has finished for " + std::to_string(options_.deadline.count()) + " ms";
    }
    return {};
  }

  ncclComm_t comm_;
  bool owns_;
  int rank_;
  Cuda device_;
  NcclOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> failed_{false};
  std::string failure_;
  bool aborted_ = false;
  mutable std::mutex comm_mutex_;  ///< asking about the communicator and giving it up exclude each other
  bool gone_ = false;              ///< under comm_mutex_: the communicator is no more
  bool stopping_ = false;
  std::string label_ = "the start, to which all ranks must come at once (one host thread a rank),";
  std::deque<Pending> pending_;
  std::vector<Cuda::Event> spare_;
  Clock::time_point progress_;
  std::thread watcher_;
};

}  // namespace detail
}  // namespace shardopt::inline v0
