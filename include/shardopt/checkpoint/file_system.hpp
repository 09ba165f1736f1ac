// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <vector>

namespace shardopt::inline v0::checkpoint {

/// A new file. Closed when destroyed; durable only after sync(). One object is used by one thread at a time.
class WritableFile {
 public:
  virtual ~WritableFile() = default;
  /// Writes all bytes at an offset. @throws CheckpointError
  virtual void write_at(std::int64_t offset, std::span<const std::byte> bytes) = 0;
  /// Returns when the content is on stable storage. @throws CheckpointError
  virtual void sync() = 0;
};

/// A file that exists. One object is used by one thread at a time.
class ReadableFile {
 public:
  virtual ~ReadableFile() = default;
  /// Bytes. @throws CheckpointError
  [[nodiscard]] virtual std::int64_t size() const = 0;
  /// Fills `bytes` from an offset. @throws CheckpointError, also where the file ends before
  virtual void read_at(std::int64_t offset, std::span<std::byte> bytes) const = 0;
};

/// What checkpoints need of a file system. A virtual interface, not a template: a call costs a system call,
/// and tests put faults and models of durability behind it.
///
/// Calls come from several threads at once: a save in the background has a thread of its own. An AsyncSaver's
/// file system must outlive its last save.
class FileSystem {
 public:
  /// An entry of a directory.
  struct Entry {
    std::filesystem::path name;  ///< without the directory
    bool is_directory = false;   ///< or a link to one
  };

  virtual ~FileSystem() = default;
  /// @throws CheckpointError if it exists
  [[nodiscard]] virtual std::unique_ptr<WritableFile> create(const std::filesystem::path& path) = 0;
  /// @throws CheckpointError if there is none
  [[nodiscard]] virtual std::unique_ptr<ReadableFile> open(const std::filesystem::path& path) const = 0;
  /// Whether there is a file or a directory.
  [[nodiscard]] virtual bool exists(const std::filesystem::path& path) const = 0;
  /// What a directory holds, in no order; nothing if there is no such directory. @throws CheckpointError
  [[nodiscard]] virtual std::vector<Entry> list(const std::filesystem::path& directory) const = 0;
  /// Makes a directory and those above it. It may exist. @throws CheckpointError
  virtual void make_directory(const std::filesystem::path& directory) = 0;
  /// Atomic: afterwards the thing has the new name only; an existing file there is replaced. @throws
  /// CheckpointError
  virtual void rename(const std::filesystem::path& from, const std::filesystem::path& to) = 0;
  /// Removes a file or a directory with all in it. It may be gone. @throws CheckpointError
  virtual void remove(const std::filesystem::path& path) = 0;
  /// Returns when the directory's entries are on stable storage. @throws CheckpointError
  virtual void sync_directory(const std::filesystem::path& directory) = 0;
};

}  // namespace shardopt::inline v0::checkpoint
