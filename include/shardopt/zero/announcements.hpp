// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/error.hpp>
#include <shardopt/core/parameter_table.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

namespace shardopt::inline v0::detail {

/// Which gradients of a step were announced.
class Announcements {
 public:
  explicit Announcements(const ParameterTable& table) : table_(&table), announced_(table.size(), false) {}

  /// Notes a set; frozen parameters are left out. @return their entries in the table
  /// @throws std::invalid_argument for an unknown id or one announced before; then nothing is noted
  [[nodiscard]] std::vector<std::uint32_t> note(std::span<const ParameterId> ids) {
    std::vector<std::uint32_t> entries;
    entries.reserve(ids.size());
    try {
      for (const ParameterId id : ids) {
        const std::uint32_t index = table_->storage_of(id).index;
        const ParameterTable::Entry& entry = table_->entries()[index];
        if (entry.frozen) continue;
        if (announced_[index]) {
          throw std::invalid_argument(
              "shardopt: the gradient of parameter " + in_quotes(entry.name) +
              " was announced twice in one step; announce in the last micro-batch only, tied weights once");
        }
        announced_[index] = true;
        entries.push_back(index);
      }
    } catch (...) {
      for (const std::uint32_t index : entries) announced_[index] = false;
      throw;
    }
    count_ += entries.size();
    return entries;
  }

  /// Whether there are any.
  [[nodiscard]] bool any() const noexcept { return count_ > 0; }

  /// For the next step.
  void clear() noexcept {
    announced_.assign(announced_.size(), false);
    count_ = 0;
  }

 private:
  const ParameterTable* table_;
  std::vector<bool> announced_;
  std::size_t count_ = 0;
};

}  // namespace shardopt::inline v0::detail
