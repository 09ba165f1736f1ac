// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/checkpoint/file_system.hpp>
#include <shardopt/core/error.hpp>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace shardopt::inline v0::checkpoint {

namespace detail {

using namespace shardopt::detail;

[[noreturn]] inline void throw_file_error(const char* call, const std::filesystem::path& path, int code) {
  const std::error_code why(code, std::generic_category());
  throw FileError("shardopt: " + std::string(call) + " of " + in_quotes(path.string()) + ": " + why.message(),
                  why);
}

/// A file descriptor that is closed.
class Descriptor {
 public:
  Descriptor(const std::filesystem::path& path, int flags, mode_t mode = 0) : path_(path) {
    do {
      descriptor_ = ::open(path.c_str(), flags | O_CLOEXEC, mode);
    } while (descriptor_ < 0 && errno == EINTR);
    if (descriptor_ < 0) throw_file_error("open", path, errno);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { static_cast<void>(::close(descriptor_)); }

  [[nodiscard]] int get() const noexcept { return descriptor_; }
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

  /// @throws CheckpointError
  void sync() const {
    int status = 0;
    do {
      status = ::fsync(descriptor_);
    } while (status < 0 && errno == EINTR);
    if (status < 0) throw_file_error("fsync", path_, errno);
  }

 private:
  std::filesystem::path path_;
  int descriptor_;
};

class PosixWritableFile final : public WritableFile {
 public:
  explicit PosixWritableFile(const std::filesystem::path& path)
      : descriptor_(path, O_WRONLY | O_CREAT | O_EXCL, 0666) {}

  void write_at(std::int64_t offset, std::span<const std::byte> bytes) override {
    while (!bytes.empty()) {
      const std::size_t piece = (std::min)(bytes.size(), piece_bytes);
      const ssize_t done = ::pwrite(descriptor_.get(), bytes.data(), piece, offset);
      if (done < 0 && errno == EINTR) continue;
      if (done < 0) throw_file_error("write", descriptor_.path(), errno);
      offset += done;
      waiting_bytes_ += done;
      bytes = bytes.subspan(static_cast<std::size_t>(done));
    }
    if (waiting_bytes_ >= write_behind_bytes) start_writing();
  }

  void sync() override { descriptor_.sync(); }

 private:
  /// For larger ones Linux takes pages of 2 MiB, and finding those can take longer than writing: in a virtual
  /// machine its host has to bring them.
  static constexpr std::size_t piece_bytes = std::size_t{1} << 20;
  static constexpr std::int64_t write_behind_bytes = std::int64_t{32} << 20;

  /// Without it most of the data would wait in memory for the final fsync.
  void start_writing() {
#ifdef SYNC_FILE_RANGE_WRITE
    static_cast<void>(::sync_file_range(descriptor_.get(), 0, 0, SYNC_FILE_RANGE_WRITE));
#endif
    waiting_bytes_ = 0;
  }

  Descriptor descriptor_;
  std::int64_t waiting_bytes_ = 0;
};

class PosixReadableFile final : public ReadableFile {
 public:
  /// Without O_NONBLOCK a pipe with this name would be waited for, before its type can be seen.
  explicit PosixReadableFile(const std::filesystem::path& path) : descriptor_(path, O_RDONLY | O_NONBLOCK) {
    struct stat status {};
    if (::fstat(descriptor_.get(), &status) != 0) throw_file_error("stat", path, errno);
    if (!S_ISREG(status.st_mode))
      throw CheckpointError("shardopt: " + in_quotes(path.string()) + " is not a regular file");
    size_ = status.st_size;
  }

  [[nodiscard]] std::int64_t size() const override { return size_; }

  void read_at(std::int64_t offset, std::span<std::byte> bytes) const override {
    while (!bytes.empty()) {
      const ssize_t done = ::pread(descriptor_.get(), bytes.data(), bytes.size(), offset);
      if (done < 0 && errno == EINTR) continue;
      if (done < 0) throw_file_error("read", descriptor_.path(), errno);
      if (done == 0) {
        throw CheckpointError("shardopt: " + in_quotes(descriptor_.path().string()) + " ends at byte " +
                              std::to_string(offset) + "; it is cut short");
      }
      offset += done;
      bytes = bytes.subspan(static_cast<std::size_t>(done));
    }
  }

 private:
  Descriptor descriptor_;
  std::int64_t size_ = 0;
};

}  // namespace detail

/// The system's files. All members may be used by several threads.
class PosixFiles final : public FileSystem {
 public:
  /// @see FileSystem
  [[nodiscard]] std::unique_ptr<WritableFile> create(const std::filesystem::path& path) override {
    return std::make_unique<detail::PosixWritableFile>(path);
  }
  /// @see FileSystem
  [[nodiscard]] std::unique_ptr<ReadableFile> open(const std::filesystem::path& path) const override {
    return std::make_unique<detail::PosixReadableFile>(path);
  }
  /// @see FileSystem
  [[nodiscard]] bool exists(const std::filesystem::path& path) const override {
    std::error_code code;
    return std::filesystem::exists(path, code);
  }
  /// @see FileSystem
  [[nodiscard]] std::vector<Entry> list(const std::filesystem::path& directory) const override {
    std::vector<Entry> entries;
    std::error_code code;
    std::filesystem::directory_iterator at(directory, code);
    for (; !code && at != std::filesystem::directory_iterator(); at.increment(code)) {
      std::error_code unknown;  // an entry that has just gone is none
      const auto type = at->symlink_status(unknown).type();
      if (unknown || type == std::filesystem::file_type::not_found) continue;
      entries.push_back({at->path().filename(), at->is_directory(unknown)});
    }
    if (code && code != std::errc::no_such_file_or_directory)
      detail::throw_file_error("list", directory, code.value());
    return entries;
  }
  /// @see FileSystem
  void make_directory(const std::filesystem::path& directory) override {
    std::error_code code;
    std::filesystem::create_directories(directory, code);
    if (code) detail::throw_file_error("mkdir", directory, code.value());
  }
  /// @see FileSystem
  void rename(const std::filesystem::path& from, const std::filesystem::path& to) override {
    std::error_code code;
    std::filesystem::rename(from, to, code);
    if (code) detail::throw_file_error("rename", from, code.value());
  }
  /// @see FileSystem
  void remove(const std::filesystem::path& path) override {
    std::error_code code;
    std::filesystem::remove_all(path, code);
    if (code) detail::throw_file_error("remove", path, code.value());
  }
  /// @see FileSystem
  void sync_directory(const std::filesystem::path& directory) override {
    detail::Descriptor(directory, O_RDONLY | O_DIRECTORY).sync();
  }

  /// The one that is used unless another is given.
  [[nodiscard]] static PosixFiles& instance() {
    static PosixFiles files;
    return files;
  }
};

}  // namespace shardopt::inline v0::checkpoint
