// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/config.hpp>

#include <cstdint>

namespace shardopt::inline v0 {

/// Gives the calling thread IEEE arithmetic for as long as it lives: rounding to nearest even, subnormals
/// neither flushed nor read as zero, no traps. Then puts back what was set before, with the exception flags
/// as they were.
///
/// Any shared object linked with `-Ofast` turns flush-to-zero on in the process that loads it; host code
/// whose bits count runs under this guard. On processors other than x86-64 it does nothing.
class FloatEnvironment {
 public:
  FloatEnvironment() noexcept {
#if SHARDOPT_HOST_AVX2
    constexpr std::uint32_t all_exceptions_masked = 0x1f80;
    asm volatile("stmxcsr %0" : "=m"(saved_) : : "memory");
    asm volatile("ldmxcsr %0" : : "m"(all_exceptions_masked) : "memory");
#endif
  }
  ~FloatEnvironment() {
#if SHARDOPT_HOST_AVX2
    asm volatile("ldmxcsr %0" : : "m"(saved_) : "memory");
#endif
  }
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  std::uint32_t saved_ = 0;
};

}  // namespace shardopt::inline v0
