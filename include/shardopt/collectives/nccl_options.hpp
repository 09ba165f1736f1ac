// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>

namespace shardopt::inline v0 {

/// How Nccl looks after a communicator.
struct NcclOptions {
  /// Greater than zero: a thread watches the communicator. It reports NCCL's asynchronous errors, collectives
  /// that have not finished though none has for this long, and calls of NCCL that take longer (the first ones
  /// wait for peers): choose more than the longest stretch of the engine's own work between two collectives.
  /// What a replayed graph has captured is under way without the thread's knowledge: of that only NCCL's own
  /// errors are seen. Joining is bounded by it too: the communicator that
  /// Nccl::create makes then does not block (ncclConfig_t::blocking is 0).
  std::chrono::milliseconds deadline{0};
  /// Whether a borrowed communicator may be aborted when it has failed: only that ends kernels that wait for
  /// a lost peer. One that the library made is aborted always. After an abort the engine must not use the
  /// communicator, nor destroy it.
  bool abort_borrowed = false;
};

}  // namespace shardopt::inline v0
