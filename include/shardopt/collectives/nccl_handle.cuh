// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/nccl_communicator.cuh>
#include <shardopt/collectives/nccl_error.cuh>
#include <shardopt/collectives/nccl_options.hpp>
#include <shardopt/core/error.hpp>
#include <shardopt/devices/cuda.cuh>

#include <cuda_runtime.h>
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace shardopt::inline v0 {

namespace detail {

/// One user's view of a communicator, with its failure: the first one stays, and every later use reports it.
/// Where another user has aborted the communicator, that is a failure here, too.
///
/// With a deadline a thread polls NCCL and the events behind enqueued collectives.
class NcclHandle {
 public:
  /// @param owns  whether the communicator is destroyed with this
  NcclHandle(ncclComm_t comm, bool owns, int rank, Cuda device, const NcclOptions& options)
      : comm_(NcclCommunicator::of(comm)), owns_(owns), rank_(rank), device_(device), options_(options) {
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
    if (owns_) comm_->destroy();
  }

  /// Makes calls of NCCL, by `body(communicator)`. The watching thread does not abort it meanwhile.
  /// @throws CollectiveError if it has failed
  template <class Body>
  ncclResult_t call(const Body& body) const {
    throw_if_failed();
    return comm_->call(body);
  }
  /// The communicator itself; null once it was aborted.
  [[nodiscard]] ncclComm_t native() const noexcept { return comm_->native(); }
  /// Whether a thread watches.
  [[nodiscard]] bool watched() const noexcept { return watcher_.joinable(); }

  /// Whether it has failed and will not be aborted.
  [[nodiscard]] bool stuck() const noexcept {
    return failed_.load(std::memory_order_acquire) && !may_abort() && !comm_->gone();
  }

  /// @throws CollectiveError with the first failure, if there was one
  void throw_if_failed() const {
    if (!failed_.load(std::memory_order_acquire)) return comm_->require_alive();
    const std::lock_guard lock(mutex_);
    throw CollectiveError(failure_);
  }

  /// Marks the communicator as failed, and aborts it where that is allowed. From any thread; the first call
  /// counts.
  void fail(std::string_view what, std::string_view reason = {}) noexcept {
    {
      const std::lock_guard lock(mutex_);
      if (failed_) return;
      try {
        failure_ = "shardopt: rank " + std::to_string(rank_) + ": " + std::string(what).append(reason);
      } catch (...) {
        failure_.clear();
      }
      failed_.store(true, std::memory_order_release);
    }
    if (may_abort()) comm_->abort(failure_);  // which stays as it is from now on
  }

  /// What the next collectives belong to, for reports.
  void label(std::string text) { label_ = std::move(text); }

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
      status = comm_->status();
    }
    if (status == ncclSuccess) return;
    throw_if_failed();
    shardopt::throw_if_failed(status, call, native(), where);
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
  [[nodiscard]] bool may_abort() const noexcept { return owns_ || options_.abort_borrowed; }

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
    const ncclResult_t status = comm_->status();
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

  std::shared_ptr<NcclCommunicator> comm_;
  bool owns_;
  int rank_;
  Cuda device_;
  NcclOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> failed_{false};
  std::string failure_;
  bool stopping_ = false;
  std::string label_ = "the start, to which all ranks must come at once (one host thread a rank),";
  std::deque<Pending> pending_;
  std::vector<Cuda::Event> spare_;
  Clock::time_point progress_;
  std::thread watcher_;
};

}  // namespace detail
}  // namespace shardopt::inline v0
