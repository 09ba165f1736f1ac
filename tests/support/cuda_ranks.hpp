// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>
#include <exception>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

/// GPUs, streams, memory and communicators as an engine has them. Assertions of Catch2 belong on the test's
/// own thread: what runs on a rank's throws.
namespace test {

inline void succeed(cudaError_t status) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string("the test's own call: ") + cudaGetErrorString(status));
}
inline void succeed(ncclResult_t status) {
  if (status != ncclSuccess)
    throw std::runtime_error(std::string("the test's own call: ") + ncclGetErrorString(status));
}

/// A stream of the current device that waits for no other.
class OwnStream {
 public:
  OwnStream() { succeed(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  ~OwnStream() {
    static_cast<void>(cudaStreamSynchronize(stream_));
    static_cast<void>(cudaStreamDestroy(stream_));
  }
  operator cudaStream_t() const noexcept { return stream_; }  // NOLINT: stands for it
  void synchronize() const { succeed(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Memory of the current device, or page-locked.
template <class T>
class OwnMemory {
 public:
  explicit OwnMemory(std::size_t count, bool pinned = false) : count_(count), pinned_(pinned) {
    void* memory = nullptr;
    if (pinned) {
      succeed(cudaHostAlloc(&memory, bytes() + 1, cudaHostAllocDefault));
    } else {
      succeed(cudaMalloc(&memory, bytes() + 1));
    }
    data_ = static_cast<T*>(memory);
  }
  OwnMemory(OwnMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(other.count_), pinned_(other.pinned_) {}
  OwnMemory& operator=(OwnMemory&&) = delete;
  OwnMemory(const OwnMemory&) = delete;
  OwnMemory& operator=(const OwnMemory&) = delete;
  ~OwnMemory() { static_cast<void>(pinned_ ? cudaFreeHost(data_) : cudaFree(data_)); }

  [[nodiscard]] T* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return count_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return count_ * sizeof(T); }

  void write(const std::vector<T>& from, cudaStream_t stream) const {
    succeed(cudaMemcpyAsync(data_, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice, stream));
  }
  void fill(int byte, cudaStream_t stream) const { succeed(cudaMemsetAsync(data_, byte, bytes(), stream)); }
  /// Waits.
  [[nodiscard]] std::vector<T> read(cudaStream_t stream) const {
    std::vector<T> result(count_);
    succeed(cudaMemcpyAsync(result.data(), data_, bytes(), cudaMemcpyDeviceToHost, stream));
    succeed(cudaStreamSynchronize(stream));
    return result;
  }

 private:
  T* data_ = nullptr;
  std::size_t count_;
  bool pinned_;
};

/// One communicator a GPU, of this process.
class Communicators {
 public:
  explicit Communicators(int world) : comms_(static_cast<std::size_t>(world)) {
    std::vector<int> devices(comms_.size());
    std::iota(devices.begin(), devices.end(), 0);
    succeed(ncclCommInitAll(comms_.data(), world, devices.data()));
  }
  Communicators(const Communicators&) = delete;
  Communicators& operator=(const Communicators&) = delete;
  ~Communicators() {
    for (ncclComm_t comm : comms_) static_cast<void>(ncclCommDestroy(comm));
  }
  [[nodiscard]] ncclComm_t operator[](int rank) const { return comms_.at(static_cast<std::size_t>(rank)); }
  [[nodiscard]] int world() const noexcept { return static_cast<int>(comms_.size()); }

 private:
  std::vector<ncclComm_t> comms_;
};

/// Runs body(rank) on a thread a rank, with GPU `rank` current, and joins them. @throws what the first that
/// failed threw
template <class Body>
void on_ranks(int world, const Body& body) {
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        succeed(cudaSetDevice(rank));
        body(rank);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace test
