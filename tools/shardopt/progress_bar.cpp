// SPDX-License-Identifier: Apache-2.0
#include "progress_bar.hpp"

#include "format.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>

namespace tool {

ProgressBar::ProgressBar(const std::string& what, bool quiet) : what_(escaped(what)), quiet_(quiet) {}

ProgressBar::~ProgressBar() {
  if (open_) std::fputs("\n", stderr);
}

void ProgressBar::show(std::int64_t done, std::int64_t total) {
  if (quiet_ || total <= 0) return;
  if (terminal_) {
    const auto now = Clock::now();
    if (open_ && done < total && now - drawn_ < std::chrono::milliseconds(100)) return;
    drawn_ = now;
    draw(done, total);
    return;
  }
  const auto tenths = static_cast<std::int64_t>(10 * static_cast<double>(done) / static_cast<double>(total));
  if (tenths <= tenths_) return;
  tenths_ = tenths;
  std::fprintf(stderr, "%s: %d %% (%s of %s)\n", what_.c_str(), static_cast<int>(10 * tenths),
               bytes_text(done).c_str(), bytes_text(total).c_str());
}

std::function<void(std::int64_t, std::int64_t)> ProgressBar::progress() {
  return [this](std::int64_t done, std::int64_t total) { show(done, total); };
}

void ProgressBar::draw(std::int64_t done, std::int64_t total) {
  constexpr int width = 30;
  const double part = static_cast<double>(done) / static_cast<double>(total);
  const auto filled = static_cast<std::size_t>(part * width);
  const std::string bar = std::string(filled, '#') + std::string(width - filled, '.');
  const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
  const std::string speed =
      seconds > 0.2 ? bytes_text(static_cast<std::int64_t>(static_cast<double>(done) / seconds)) + "/s" : "";
  std::fprintf(stderr, "\r%s [%s] %3d %%  %s of %s  %s\x1b[K", what_.c_str(), bar.c_str(),
               static_cast<int>(100 * part), bytes_text(done).c_str(), bytes_text(total).c_str(),
               speed.c_str());
  open_ = true;
  if (done >= total) {
    std::fputs("\n", stderr);
    open_ = false;
    quiet_ = true;  // what is told after the end is the same end
  }
}

}  // namespace tool
