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
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
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
/// With a deadline a thread polls NCCL, the call of NCCL that is under way, and the events behind enqueued
/// collectives.
class NcclHandle {
 public:
  /// @param owns  whether the communicator is destroyed with this
  NcclHandle(ncclComm_t comm, bool owns, int rank, Cuda device, const NcclOptions& options)
      : comm_(NcclCommunicator::of(comm)), owns_(owns), rank_(rank), device_(device), options_(options) {
    if (watched()) watcher_ = std::thread([this] { watch(); });
  }
  NcclHandle(const NcclHandle&) = delete;
  NcclHandle& operator=(const NcclHandle&) = delete;
  ~NcclHandle() { close(); }

  /// Ends the use of the communicator, which is destroyed if it is the library's own. Events can still be
  /// waited for. Not while another thread is in a call.
  void close() noexcept {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (watcher_.joinable()) watcher_.join();
    closed_ = true;
    if (std::exchange(owns_, false)) comm_->destroy();
  }

  /// Makes calls of NCCL, by `body(communicator)`, which gives the last one's result, and watches for the end
  /// of what they enqueue on `stream`.
  /// @param name  of the last call, for messages
  /// @throws CollectiveError if the communicator has failed, also while it is under way; NcclError
  template <class Body>
  void enqueue(const char* name, cudaStream_t stream, const Body& body,
               Location where = Location::current()) {
    throw_if_failed();
    const Calling calling(*this);
    settle(comm_->call(body), name, where);
    track(stream);
  }
  /// The communicator itself; null once it was aborted.
  [[nodiscard]] ncclComm_t native() const noexcept { return comm_->native(); }
  /// Whether a thread watches.
  [[nodiscard]] bool watched() const noexcept { return options_.deadline.count() > 0; }

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
  void label(std::string text) {
    const std::lock_guard lock(mutex_);
    label_ = std::move(text);
  }

  /// Waits for an event; if the communicator fails meanwhile, gives up. After close() it only waits.
  /// @throws CollectiveError, CudaError
  void wait(const Cuda::Event& event) const {
    if (!watched()) {
      device_.synchronize(event);
      // An abort ends what the event marks, too. A failure without one is told by the call that met it.
      if (!closed_) comm_->require_alive();
      return;
    }
    for (;;) {
      const cudaError_t status = query(event);
      throw_if_lost();
      if (status == cudaSuccess) return;
      if (status != cudaErrorNotReady) shardopt::throw_if_failed(status, "cudaEventQuery");
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

 private:
  [[nodiscard]] bool may_abort() const noexcept { return owns_ || options_.abort_borrowed; }

  /// @throws CollectiveError if it has failed before it was closed
  void throw_if_lost() const {
    if (failed_.load(std::memory_order_acquire) || !closed_) throw_if_failed();
  }

  /// Until something else is said: "the start, …, has not finished".
  static constexpr std::string_view at_the_start =
      "the start, to which all ranks must come at once (one host thread a rank),";

  using Clock = std::chrono::steady_clock;

  /// A call of NCCL is under way. Most enqueue and return at once; the first ones wait for peers, to connect.
  class Calling {
   public:
    explicit Calling(NcclHandle& handle) : handle_(handle) { set(Clock::now()); }
    Calling(const Calling&) = delete;
    Calling& operator=(const Calling&) = delete;
    ~Calling() { set(std::nullopt); }

   private:
    void set(std::optional<Clock::time_point> since) {
      if (!handle_.watched()) return;
      const std::lock_guard lock(handle_.mutex_);
      handle_.calling_since_ = since;
    }

    NcclHandle& handle_;
  };

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
  void settle(ncclResult_t status, const char* call, Location where) const {
    while (status == ncclInProgress) {
      throw_if_failed();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      status = comm_->status();
    }
    throw_if_failed();  // it may have been given up while the call waited
    shardopt::throw_if_failed(status, call, native(), where);
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

  void watch() noexcept {
    try {
      watch_until_told();
    } catch (const std::exception& error) {
      fail("the thread that watches the communicator has failed: ", error.what());
    }
  }

  void watch_until_told() {
    shardopt::throw_if_failed(cudaSetDevice(device_.ordinal()), "cudaSetDevice");
    cudaStreamCaptureMode mode =
        cudaStreamCaptureModeRelaxed;  // queries here must not end another thread's capture
    shardopt::throw_if_failed(cudaThreadExchangeStreamCaptureMode(&mode),
                              "cudaThreadExchangeStreamCaptureMode");
    std::unique_lock lock(mutex_);
    while (!stopping_ && !failed_) {
      changed_.wait_for(lock, std::chrono::milliseconds(20));
      if (stopping_ || failed_) return;
      const std::string reason = collect(lock);
      if (reason.empty()) continue;
      const std::string oldest = !pending_.empty() ? pending_.front().label + " has not finished"
                                 : calling_since_  ? label_ + " has not begun"
                                                   : "nothing was under way";
      lock.unlock();
      fail(oldest + "; " + reason);
      lock.lock();
    }
  }

  /// Drops what has finished, well or not: a failure of CUDA's is the next call's to report. @return what is
  /// wrong, or nothing
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
    if (calling_since_ && Clock::now() - *calling_since_ > options_.deadline) {
      return "a call of NCCL has waited for " + std::to_string(options_.deadline.count()) +
             " ms: for a peer that has not come to it?";
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
  std::atomic<bool> closed_{false};
  std::string label_ = std::string(at_the_start);
  std::deque<Pending> pending_;
  std::vector<Cuda::Event> spare_;
  Clock::time_point progress_;
  std::optional<Clock::time_point> calling_since_;
  std::thread watcher_;
};

}  // namespace detail
}  // namespace shardopt::inline v0
