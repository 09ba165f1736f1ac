// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nccl.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <new>
#include <stdexcept>
#include <thread>

namespace support {

/// What processes that are forked share: a communicator's id, once rank 0 has made it, and a place to wait.
class UniqueIdBoard {
 public:
  /// Makes the id on rank 0, waits for it on the others.
  ncclUniqueId meet(int rank) {
    if (rank == 0) {
      if (ncclGetUniqueId(&id_) != ncclSuccess) throw std::runtime_error("ncclGetUniqueId failed");
      ready_ = true;
    }
    while (!ready_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return id_;
  }
  /// Waits until all ranks have come. Once.
  void wait_for_all(int world) {
    for (++came_; came_ < world;) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

 private:
  std::atomic<bool> ready_{false};
  std::atomic<int> came_{0};
  ncclUniqueId id_{};
};

/// In memory that what is forked from now on shares; never given back.
inline UniqueIdBoard& make_unique_id_board() {
  void* memory =
      mmap(nullptr, sizeof(UniqueIdBoard), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("mmap failed");
  return *new (memory) UniqueIdBoard;
}

}  // namespace support
