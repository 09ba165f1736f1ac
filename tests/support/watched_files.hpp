// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/checkpoint/file_system.hpp>
#include <shardopt/core/range.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace test {

namespace so = shardopt;

/// One rank's way to a file system: counts its calls and bytes, and fails where it is told to.
class WatchedFiles final : public so::checkpoint::FileSystem {
 public:
  explicit WatchedFiles(FileSystem& inner) : inner_(inner) {}

  /// The how-manyth call from now on fails; 0: none does. A write that fails has written half.
  std::int64_t fail_at = 0;
  std::string reason = "No space left on device";
  /// Bytes that can still be written.
  std::int64_t room = (std::numeric_limits<std::int64_t>::max)();
  /// Is called before each call with its name and path; may take its time, or throw.
  std::function<void(const std::string&, const std::filesystem::path&)> before = {};
  /// Likewise before each reading, with the bytes of the file.
  std::function<void(const std::filesystem::path&, so::Range)> before_read = {};

  /// Calls until now.
  [[nodiscard]] std::int64_t calls() const noexcept { return calls_; }
  /// The call that failed, for messages.
  [[nodiscard]] const std::string& failed() const noexcept { return failed_; }
  /// Bytes that were read of each file.
  [[nodiscard]] const std::map<std::string, std::int64_t>& bytes_read() const noexcept { return bytes_read_; }
  /// Bytes that were written.
  [[nodiscard]] std::int64_t bytes_written() const noexcept { return bytes_written_; }

  [[nodiscard]] std::unique_ptr<so::checkpoint::WritableFile> create(
      const std::filesystem::path& path) override {
    enter("open", path);
    return std::make_unique<Written>(*this, inner_.create(path), path);
  }
  [[nodiscard]] std::unique_ptr<so::checkpoint::ReadableFile> open(
      const std::filesystem::path& path) const override {
    enter("open", path);
    return std::make_unique<Read>(*this, inner_.open(path), path);
  }
  [[nodiscard]] bool exists(const std::filesystem::path& path) const override { return inner_.exists(path); }
  [[nodiscard]] std::vector<Entry> list(const std::filesystem::path& directory) const override {
    enter("list", directory);
    return inner_.list(directory);
  }
  void make_directory(const std::filesystem::path& directory) override {
    enter("mkdir", directory);
    inner_.make_directory(directory);
  }
  void rename(const std::filesystem::path& from, const std::filesystem::path& to) override {
    enter("rename", from);
    inner_.rename(from, to);
  }
  void remove(const std::filesystem::path& path) override {
    enter("remove", path);
    inner_.remove(path);
  }
  void sync_directory(const std::filesystem::path& directory) override {
    enter("fsync", directory);
    inner_.sync_directory(directory);
  }

 private:
  class Written final : public so::checkpoint::WritableFile {
   public:
    Written(WatchedFiles& files, std::unique_ptr<WritableFile> inner, std::filesystem::path path)
        : files_(files), inner_(std::move(inner)), path_(std::move(path)) {}
    void write_at(std::int64_t offset, std::span<const std::byte> bytes) override {
      try {
        files_.enter("write", path_);
      } catch (const so::CheckpointError&) {
        inner_->write_at(offset, bytes.first(bytes.size() / 2));
        throw;
      }
      const auto fits =
          static_cast<std::size_t>((std::min)(files_.room, static_cast<std::int64_t>(bytes.size())));
      inner_->write_at(offset, bytes.first(fits));
      files_.room -= static_cast<std::int64_t>(fits);
      files_.bytes_written_ += static_cast<std::int64_t>(fits);
      if (fits < bytes.size()) files_.fail("write", path_);
    }
    void sync() override {
      files_.enter("fsync", path_);
      inner_->sync();
    }

   private:
    WatchedFiles& files_;
    std::unique_ptr<WritableFile> inner_;
    std::filesystem::path path_;
  };

  class Read final : public so::checkpoint::ReadableFile {
   public:
    Read(const WatchedFiles& files, std::unique_ptr<ReadableFile> inner, std::filesystem::path path)
        : files_(files), inner_(std::move(inner)), path_(std::move(path)) {}
    [[nodiscard]] std::int64_t size() const override { return inner_->size(); }
    void read_at(std::int64_t offset, std::span<std::byte> bytes) const override {
      files_.enter("read", path_);
      if (files_.before_read)
        files_.before_read(path_, {offset, offset + static_cast<std::int64_t>(bytes.size())});
      files_.bytes_read_[path_.filename().string()] += static_cast<std::int64_t>(bytes.size());
      inner_->read_at(offset, bytes);
    }

   private:
    const WatchedFiles& files_;
    std::unique_ptr<ReadableFile> inner_;
    std::filesystem::path path_;
  };

  void enter(const std::string& call, const std::filesystem::path& path) const {
    if (before) before(call, path);
    if (++calls_ == fail_at) fail(call, path);
  }

  [[noreturn]] void fail(const std::string& call, const std::filesystem::path& path) const {
    failed_ = call + " of " + path.string();
    throw so::CheckpointError("shardopt: " + call + " of '" + path.string() + "': " + reason);
  }

  FileSystem& inner_;
  mutable std::int64_t calls_ = 0;
  mutable std::string failed_;
  mutable std::map<std::string, std::int64_t> bytes_read_;
  std::int64_t bytes_written_ = 0;
};

}  // namespace test
