// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>

namespace mlp {

/// Tells something on standard error, in a line of its own.
inline void say(const std::string& what) {
  if (isatty(STDOUT_FILENO) != 0) {  // where the bar stands
    std::printf("\r\033[K");
    std::fflush(stdout);
  }
  std::fprintf(stderr, "mlp: %s\n", what.c_str());
}

/// How far a run is: a bar that is redrawn where standard output is a terminal, else one line each epoch (at
/// most some twenty lines).
class Progress {
 public:
  explicit Progress(int epochs) : epochs_(epochs), every_(std::max(1, epochs / 20)) {}
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress() {
    if (bar_stands_) std::printf("\n");
  }

  /// An epoch has ended.
  void epoch(int done, double loss, double lr) {
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    if (terminal_) {
      constexpr int width = 30;
      const int filled = static_cast<int>(static_cast<long long>(width) * done / epochs_);
      std::string bar(static_cast<std::size_t>(filled), '#');
      bar.append(static_cast<std::size_t>(width - filled), '.');
      std::printf("\r[%s] epoch %d/%d  loss %.4f  lr %.2e  %.1f s ", bar.c_str(), done, epochs_, loss, lr,
                  seconds);
      bar_stands_ = true;
    } else if (done % every_ == 0 || done == epochs_) {
      std::printf("epoch %d/%d  loss %.4f  lr %.2e  %.1f s\n", done, epochs_, loss, lr, seconds);
    }
    std::fflush(stdout);
  }

 private:
  int epochs_;
  int every_;
  bool bar_stands_ = false;
  bool terminal_ = isatty(STDOUT_FILENO) != 0;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace mlp
