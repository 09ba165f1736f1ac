// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
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
    explicit Entry(std::string folder) : saves_(instance()), folder_(std::move(folder)) {
      const std::lock_guard lock(saves_->mutex_);
      saves_->folders_.insert(folder_);
    }
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;
    ~Entry() {
      const std::lock_guard lock(saves_->mutex_);
      saves_->folders_.erase(folder_);
    }

   private:
    std::shared_ptr<BackgroundSaves> saves_;  ///< a saver of static storage may outlive that of instance()
    std::string folder_;
  };

  [[nodiscard]] static bool contain(const std::string& folder) {
    BackgroundSaves& saves = *instance();
    const std::lock_guard lock(saves.mutex_);
    return saves.folders_.contains(folder);
  }

 private:
  [[nodiscard]] static const std::shared_ptr<BackgroundSaves>& instance() {
    static const auto saves = std::make_shared<BackgroundSaves>();
    return saves;
  }

  std::mutex mutex_;
  std::set<std::string> folders_;
};

}  // namespace shardopt::inline v0::checkpoint::detail
