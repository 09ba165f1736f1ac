// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

/// Programs with watched_new.cpp replace operator new: each thread knows what it has asked for.
namespace test {

struct Allocations {
  std::int64_t largest = 0;  ///< bytes of the largest single request since begin()
  std::int64_t live = 0;     ///< bytes that this thread asked for and gave back, as a difference
  std::int64_t peak = 0;     ///< the most that `live` was since begin()

  /// Counts from here on.
  void begin() {
    largest = 0;
    peak = live;
  }
};

/// Of the calling thread.
[[nodiscard]] Allocations& allocations_here();

}  // namespace test
