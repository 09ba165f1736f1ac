// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>
#include <shardopt/checkpoint/posix_files.hpp>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace test {

/// A folder of a test's own that goes with it.
class ScratchFolder {
 public:
  ScratchFolder() {
    static std::atomic<int> counter = 0;
    path_ = std::filesystem::temp_directory_path() /
            ("shardopt-test-" + std::to_string(::getpid()) + "-" + std::to_string(counter++));
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  [[nodiscard]] std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

/// Names of what a folder holds, in the order of texts.
[[nodiscard]] inline std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

/// The system's files without waiting for stable storage. To be derived from, where a test watches calls.
class QuickFiles : public shardopt::checkpoint::FileSystem {
 public:
  class File : public shardopt::checkpoint::WritableFile {
   public:
    explicit File(std::unique_ptr<WritableFile> file) : file_(std::move(file)) {}
    void write_at(std::int64_t offset, std::span<const std::byte> bytes) override {
      file_->write_at(offset, bytes);
    }
    void sync() override {}

   private:
    std::unique_ptr<WritableFile> file_;
  };

  [[nodiscard]] std::unique_ptr<shardopt::checkpoint::WritableFile> create(
      const std::filesystem::path& path) override {
    return std::make_unique<File>(files_.create(path));
  }
  [[nodiscard]] std::unique_ptr<shardopt::checkpoint::ReadableFile> open(
      const std::filesystem::path& path) const override {
    return files_.open(path);
  }
  [[nodiscard]] bool exists(const std::filesystem::path& path) const override { return files_.exists(path); }
  [[nodiscard]] std::vector<Entry> list(const std::filesystem::path& path) const override {
    return files_.list(path);
  }
  void make_directory(const std::filesystem::path& path) override { files_.make_directory(path); }
  void rename(const std::filesystem::path& from, const std::filesystem::path& to) override {
    files_.rename(from, to);
  }
  void remove(const std::filesystem::path& path) override { files_.remove(path); }
  void sync_directory(const std::filesystem::path&) override {}

 private:
  shardopt::checkpoint::PosixFiles files_;
};

}  // namespace test
