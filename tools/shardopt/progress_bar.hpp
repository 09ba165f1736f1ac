// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

namespace tool {

/// How far a work is, on standard error: a bar that is redrawn on a terminal, a line every tenth of the way
/// in a log, nothing if quiet.
class ProgressBar {
 public:
  /// @param what  "Merging ZeRO-1 shards"
  ProgressBar(const std::string& what, bool quiet);
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  /// Leaves the bar as it stands, and the cursor on a line of its own.
  ~ProgressBar();

  /// So much is done.
  void show(std::int64_t done, std::int64_t total);
  /// For the library's calls; refers to this object.
  [[nodiscard]] std::function<void(std::int64_t, std::int64_t)> progress();

 private:
  using Clock = std::chrono::steady_clock;

  void draw(std::int64_t done, std::int64_t total);

  std::string what_;
  bool quiet_;
  bool terminal_ = isatty(STDERR_FILENO) != 0;
  bool open_ = false;  ///< whether the cursor stands behind the bar
  std::int64_t tenths_ = -1;
  Clock::time_point start_ = Clock::now();
  Clock::time_point drawn_ = {};
};

}  // namespace tool
