// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

/// This test program replaces operator new and counts, each thread for itself. The Host device allocates with
/// an alignment, nothing else here does.
namespace test {

struct AllocationCounts {
  std::int64_t aligned_calls = 0;
  std::int64_t aligned_bytes = 0;
  std::int64_t plain_bytes = 0;
};

/// Of the calling thread, since it began.
[[nodiscard]] AllocationCounts& allocations();

}  // namespace test
