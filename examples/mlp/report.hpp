// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/shardopt.hpp>

#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

namespace mlp {

/// 1234567 as 1,234,567.
inline std::string with_commas(std::int64_t count) {
  std::string text = std::to_string(count);
  for (std::size_t at = text.size(); at > 3;) text.insert(at -= 3, ",");
  return text;
}

/// Bytes in MiB, to two places.
inline std::string mebibytes(std::int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

/// Collects what the library tells about one rank: its memory before and after the optimizer's allocation,
/// skipped steps.
class Report : public shardopt::Observer {
 public:
  /// @param device         what memory is called in the lines: "device" or "host"
  /// @param memory_in_use  bytes in use there
  Report(int rank, std::string device, std::function<std::int64_t()> memory_in_use)
      : rank_(rank), device_(std::move(device)), memory_in_use_(std::move(memory_in_use)) {}

  void before_allocation(const shardopt::MemoryPlan& plan) override {
    line("before allocation: " + in_use() + ", the optimizer will ask for " + mebibytes(plan.device_bytes));
  }

  void after_allocation(const shardopt::MemoryPlan& plan) override {
    char share[32];
    std::snprintf(share, sizeof share, "%.1f %%",
                  100.0 * static_cast<double>(plan.owned_parameters) / static_cast<double>(plan.parameters));
    line("after allocation: " + in_use());
    text_ += "[ZeRO sharding] Size of optimizer params per rank: " +
             mebibytes(plan.state_bytes + plan.master_bytes) + " (rank " + std::to_string(rank_) + " owns " +
             with_commas(plan.owned_parameters) + " of " + with_commas(plan.parameters) + " parameters, " +
             share + "; unsharded " + mebibytes(plan.unsharded_state_bytes) + ")\n";
  }

  void step_skipped(const shardopt::StepResult& result) override {
    if (rank_ == 0)
      std::printf("step %lld skipped: the gradient is not finite\n",
                  static_cast<long long>(result.iteration));
  }

  void warning(std::string_view text) override { line("warning: " + std::string(text)); }

  /// The lines so far.
  [[nodiscard]] const std::string& text() const { return text_; }

 private:
  void line(const std::string& what) { text_ += "[rank " + std::to_string(rank_) + "] " + what + '\n'; }
  [[nodiscard]] std::string in_use() const {
    return device_ + " memory in use " + mebibytes(memory_in_use_());
  }

  int rank_;
  std::string device_;
  std::function<std::int64_t()> memory_in_use_;
  std::string text_;
};

}  // namespace mlp
