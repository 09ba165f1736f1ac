// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <support/cuda_calls.hpp>

#include <atomic>
#include <mutex>
#include <string>

/// Which call of CUDA or NCCL failed first, and whose it was. The program must count its calls
/// (support/cuda_calls.cmake).
namespace test::first_failure {

enum class Part {
  library,  ///< a call of the library, or what its watching thread does
  engine,   ///< the program's own
  end,      ///< destructors: they report nothing
};

/// Of a thread that is no rank's: it watches a communicator.
inline constexpr int no_rank = -1;

inline thread_local int this_rank = no_rank;
inline thread_local Part this_part = Part::library;
/// From then on what watching threads do belongs to the end.
inline std::atomic<bool> all_ending{false};

struct Failure {
  std::string function;  ///< empty: none has failed
  int rank = no_rank;
  Part part = Part::library;
};

inline std::mutex mutex;
inline Failure first;

[[nodiscard]] inline Failure get() {
  const std::lock_guard lock(mutex);
  return first;
}

inline void observe() {
  cuda_calls::on_failure([](const char* function) {
    const std::lock_guard lock(mutex);
    if (!first.function.empty()) return;
    first = {function, this_rank, all_ending ? Part::end : this_part};
  });
}

/// The calls while it lives are the engine's.
class InEngine {
 public:
  InEngine() : before_(this_part) { this_part = Part::engine; }
  InEngine(const InEngine&) = delete;
  InEngine& operator=(const InEngine&) = delete;
  ~InEngine() { this_part = before_; }

 private:
  Part before_;
};

}  // namespace test::first_failure
