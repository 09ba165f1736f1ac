// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

/// This test program replaces operator new and counts what is allocated at a time.
namespace test {

/// The most that was allocated at a time since it was made, beside what was then.
class PeakMemory {
 public:
  PeakMemory();
  [[nodiscard]] std::int64_t bytes() const;

 private:
  std::int64_t before_;
};

}  // namespace test
