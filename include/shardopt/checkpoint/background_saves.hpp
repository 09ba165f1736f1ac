// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace shardopt::inline v0::checkpoint::detail {

/// Folders that threads of this process write to: no other save may take them for leftovers. By their names,
/// which hold a random id.
class BackgroundSaves {
 public:
  /// Keeps a folder among them for as long as it lives.
  class Entry {
   public:
    explicit Entry(std::string folder) : folder_(std::move(folder)) {
      const std::lock_guard lock(instance().mutex_);
      instance().folders_.insert(folder_);
    }
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;
    ~Entry() {
      const std::lock_guard lock(instance().mutex_);
      instance().folders_.erase(folder_);
    }

   private:
    std::string folder_;
  };

  [[nodiscard]] static bool contain(const std::string& folder) {
    const std::lock_guard lock(instance().mutex_);
    return instance().folders_.contains(folder);
  }

 private:
  [[nodiscard]] static BackgroundSaves& instance() {
    static BackgroundSaves saves;
    return saves;
  }

  std::mutex mutex_;
  std::set<std::string> folders_;
};

}  // namespace shardopt::inline v0::checkpoint::detail
