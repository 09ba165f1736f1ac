// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/checkpoint/file_system.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

/// A file system in memory that knows what is on stable storage, so that a test can cut the power after any
/// operation.
namespace test {

namespace so = shardopt;

/// What a disk holds: numbered files and directories, number 0 the root.
struct Disk {
  struct Node {
    bool is_directory = false;
    std::string bytes = {};                           ///< of a file
    std::map<std::string, std::size_t> entries = {};  ///< of a directory
    friend bool operator==(const Node&, const Node&) = default;
  };
  std::vector<Node> nodes = {Node{.is_directory = true}};

  friend bool operator==(const Disk&, const Disk&) = default;
};

/// One change of a disk, or one promise that changes stay.
struct DiskOperation {
  enum class Kind { make, link, write, sync, sync_directory };
  Kind kind;
  std::size_t node = 0;      ///< that is made, written, synced; of `link` the directory
  std::string name = {};     ///< of `link`: the entry …
  std::size_t entry = gone;  ///< … and what it names from now on
  std::string from = {};     ///< of `link`: an entry that goes in the same instant, if it is a rename
  bool is_directory = false;
  std::int64_t offset = 0;
  std::string bytes = {};
  std::string text = {};  ///< for messages

  static constexpr std::size_t gone = ~std::size_t{0};
};

/// Does an operation. @param bytes  what is written, of a write
inline void apply(const DiskOperation& operation, const std::string& bytes, Disk& disk) {
  using Kind = DiskOperation::Kind;
  if (operation.kind == Kind::make) {
    disk.nodes.push_back({.is_directory = operation.is_directory});
  } else if (operation.kind == Kind::link) {
    auto& entries = disk.nodes[operation.node].entries;
    if (!operation.from.empty()) entries.erase(operation.from);
    entries.erase(operation.name);
    if (operation.entry != DiskOperation::gone) entries[operation.name] = operation.entry;
  } else if (operation.kind == Kind::write) {
    auto& all = disk.nodes[operation.node].bytes;
    const auto offset = static_cast<std::size_t>(operation.offset);
    if (all.size() < offset + bytes.size()) all.resize(offset + bytes.size(), '\0');
    std::copy(bytes.begin(), bytes.end(), all.begin() + static_cast<std::ptrdiff_t>(offset));
  }
}

/// All that can be reached on a disk, as one text: to compare disks.
[[nodiscard]] inline std::string contents_of(const Disk& disk, std::size_t node = 0) {
  std::string text;
  for (const auto& [name, entry] : disk.nodes[node].entries) {
    const Disk::Node& there = disk.nodes[entry];
    const std::string inside = there.is_directory ? contents_of(disk, entry) : there.bytes;
    text += (there.is_directory ? "directory " : "file ") + name + " " + std::to_string(inside.size()) +
            "\n" + inside + "\n";
  }
  return text;
}

/// What of the operations that nothing had made durable survives when the power goes.
struct Survival {
  enum class Kind { nothing, everything, some };
  Kind kind = Kind::nothing;
  std::uint64_t seed = 0;  ///< of `some`
};

/// The disk after the first `count` operations and a loss of power.
///
/// A file's content is durable up to its last sync. What was written later survives whole, torn, with zeros
/// at its end, or not at all, each write for itself. An entry of a directory is durable when that directory
/// was synced: what came later (made, renamed, removed) survives or not, each change for itself, whatever
/// came before it. A rename is atomic. Syncing a file does nothing for the entry that names it.
[[nodiscard]] inline Disk after_power_loss(const Disk& start, const std::vector<DiskOperation>& operations,
                                           std::size_t count, Survival survival) {
  using Kind = DiskOperation::Kind;
  std::mt19937_64 random(survival.seed * 1000003 + count);
  std::map<std::size_t, std::size_t> synced;  // of a node: what came before this operation stays
  for (std::size_t k = 0; k < count; ++k) {
    if (operations[k].kind == Kind::sync || operations[k].kind == Kind::sync_directory)
      synced[operations[k].node] = k;
  }
  const std::uint64_t percent = 10 + random() % 81;  // some disks lose most, some little
  Disk disk = start;
  for (std::size_t k = 0; k < count; ++k) {
    const DiskOperation& operation = operations[k];
    const auto found = synced.find(operation.node);
    const bool durable = operation.kind == Kind::make || (found != synced.end() && k < found->second);
    if (durable || survival.kind == Survival::Kind::everything) {
      apply(operation, operation.bytes, disk);
    } else if (survival.kind == Survival::Kind::some && random() % 100 < percent) {
      std::string bytes = operation.bytes;
      const std::size_t whole = bytes.empty() ? 0 : random() % (bytes.size() + 1);
      const std::uint64_t damage = random() % 3;
      if (damage == 1) bytes.resize(whole);
      if (damage == 2) std::fill(bytes.begin() + static_cast<std::ptrdiff_t>(whole), bytes.end(), '\0');
      apply(operation, bytes, disk);
    }
  }
  return disk;
}

/// Files in memory. Keeps a list of all that changed since it was made. For several threads.
class DurableFiles final : public so::checkpoint::FileSystem {
 public:
  DurableFiles() = default;
  /// All of this is on stable storage.
  explicit DurableFiles(Disk disk) : start_(disk), disk_(std::move(disk)) {}
  /// Nothing after `start` is known to be on stable storage that the operations did not sync: what another
  /// process left when it was killed.
  DurableFiles(const Disk& start, std::vector<DiskOperation> operations)
      : start_(start), disk_(start), operations_(std::move(operations)) {
    for (const auto& operation : operations_) apply(operation, operation.bytes, disk_);
  }

  [[nodiscard]] std::unique_ptr<so::checkpoint::WritableFile> create(
      const std::filesystem::path& path) override {
    const std::lock_guard lock(mutex_);
    const auto [directory, name] = place(path);
    if (disk_.nodes[directory].entries.contains(name)) refuse("open", path, "File exists");
    return std::make_unique<Written>(*this, make(directory, name, false, path), path);
  }

  [[nodiscard]] std::unique_ptr<so::checkpoint::ReadableFile> open(
      const std::filesystem::path& path) const override {
    const std::lock_guard lock(mutex_);
    const std::size_t node = find(path);
    if (node == DiskOperation::gone) refuse("open", path, "No such file or directory");
    if (disk_.nodes[node].is_directory) refuse("open", path, "Is a directory");
    return std::make_unique<Read>(disk_.nodes[node].bytes, path);
  }

  [[nodiscard]] bool exists(const std::filesystem::path& path) const override {
    const std::lock_guard lock(mutex_);
    return find(path) != DiskOperation::gone;
  }

  [[nodiscard]] std::vector<Entry> list(const std::filesystem::path& directory) const override {
    const std::lock_guard lock(mutex_);
    std::vector<Entry> result;
    const std::size_t node = find(directory);
    if (node == DiskOperation::gone) return result;
    if (!disk_.nodes[node].is_directory) refuse("list", directory, "Not a directory");
    for (const auto& [name, entry] : disk_.nodes[node].entries)
      result.push_back({name, disk_.nodes[entry].is_directory});
    return result;
  }

  void make_directory(const std::filesystem::path& directory) override {
    const std::lock_guard lock(mutex_);
    std::filesystem::path at = "/";
    std::size_t node = 0;
    for (const auto& part : directory.relative_path()) {
      if (part.empty()) continue;
      at /= part;
      auto& entries = disk_.nodes[node].entries;
      const auto found = entries.find(part.string());
      node = found == entries.end() ? make(node, part.string(), true, at) : found->second;
      if (!disk_.nodes[node].is_directory) refuse("mkdir", directory, "Not a directory");
    }
  }

  void rename(const std::filesystem::path& from, const std::filesystem::path& to) override {
    const std::lock_guard lock(mutex_);
    const auto [directory, old_name] = place(from);
    const auto [to_directory, name] = place(to);
    auto& entries = disk_.nodes[directory].entries;
    const auto found = entries.find(old_name);
    if (found == entries.end()) refuse("rename", from, "No such file or directory");
    if (directory != to_directory) refuse("rename", from, "between directories: not modelled");
    const auto there = entries.find(name);
    if (there != entries.end() && disk_.nodes[there->second].is_directory)
      refuse("rename", from, "Directory not empty");
    change({.kind = DiskOperation::Kind::link,
            .node = directory,
            .name = name,
            .entry = found->second,
            .from = old_name,
            .text = "rename " + from.string() + " to " + name});
  }

  void remove(const std::filesystem::path& path) override {
    const std::lock_guard lock(mutex_);
    if (find(path) != DiskOperation::gone) remove_all(path);
  }

  void sync_directory(const std::filesystem::path& directory) override {
    const std::lock_guard lock(mutex_);
    const std::size_t node = find(directory);
    if (node == DiskOperation::gone) refuse("open", directory, "No such file or directory");
    change({.kind = DiskOperation::Kind::sync_directory,
            .node = node,
            .text = "sync the directory " + directory.string()});
  }

  /// What there is now.
  [[nodiscard]] Disk disk() const {
    const std::lock_guard lock(mutex_);
    return disk_;
  }
  /// What there was when this was made.
  [[nodiscard]] const Disk& start() const noexcept { return start_; }
  /// What happened since, in order.
  [[nodiscard]] std::vector<DiskOperation> operations() const {
    const std::lock_guard lock(mutex_);
    return operations_;
  }

  /// The bytes of a file; a test's way to look and to damage, past all that is counted.
  [[nodiscard]] std::string& bytes(const std::filesystem::path& path) {
    return disk_.nodes[find(path)].bytes;
  }

  /// The paths of all files below a directory.
  [[nodiscard]] std::vector<std::filesystem::path> all_files(const std::filesystem::path& directory) const {
    std::vector<std::filesystem::path> result;
    for (const Entry& entry : list(directory)) {
      if (!entry.is_directory) result.push_back(directory / entry.name);
      if (!entry.is_directory) continue;
      for (const auto& path : all_files(directory / entry.name)) result.push_back(path);
    }
    return result;
  }

 private:
  class Written final : public so::checkpoint::WritableFile {
   public:
    Written(DurableFiles& files, std::size_t node, const std::filesystem::path& path)
        : files_(files), node_(node), path_(path.string()) {}
    void write_at(std::int64_t offset, std::span<const std::byte> bytes) override {
      const std::lock_guard lock(files_.mutex_);
      files_.change({.kind = DiskOperation::Kind::write,
                     .node = node_,
                     .offset = offset,
                     .bytes = std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()),
                     .text = "write " + path_});
    }
    void sync() override {
      const std::lock_guard lock(files_.mutex_);
      files_.change({.kind = DiskOperation::Kind::sync, .node = node_, .text = "sync " + path_});
    }

   private:
    DurableFiles& files_;
    std::size_t node_;
    std::string path_;
  };

  /// As it was when it was opened: nothing here writes to a file that is read.
  class Read final : public so::checkpoint::ReadableFile {
   public:
    Read(std::string bytes, std::filesystem::path path) : bytes_(std::move(bytes)), path_(std::move(path)) {}
    [[nodiscard]] std::int64_t size() const override { return static_cast<std::int64_t>(bytes_.size()); }
    void read_at(std::int64_t offset, std::span<std::byte> into) const override {
      const auto begin = static_cast<std::size_t>(offset);
      if (begin > bytes_.size() || into.size() > bytes_.size() - begin)
        refuse("read", path_, "it is cut short");
      const auto from = std::as_bytes(std::span(bytes_)).subspan(begin, into.size());
      std::copy(from.begin(), from.end(), into.begin());
    }

   private:
    std::string bytes_;
    std::filesystem::path path_;
  };

  [[noreturn]] static void refuse(const std::string& call, const std::filesystem::path& path,
                                  const std::string& why) {
    throw so::CheckpointError("shardopt: " + call + " of '" + path.string() + "': " + why);
  }

  [[nodiscard]] std::size_t find(const std::filesystem::path& path) const {
    std::size_t node = 0;
    for (const auto& part : path.relative_path()) {
      if (part.empty() || (part == "." && disk_.nodes[node].is_directory)) continue;
      const auto& entries = disk_.nodes[node].entries;
      const auto found = entries.find(part.string());
      if (found == entries.end()) return DiskOperation::gone;
      node = found->second;
    }
    return node;
  }

  [[nodiscard]] std::pair<std::size_t, std::string> place(const std::filesystem::path& path) const {
    const std::size_t directory = find(path.parent_path());
    if (directory == DiskOperation::gone || !disk_.nodes[directory].is_directory)
      refuse("open", path, "No such file or directory");
    return {directory, path.filename().string()};
  }

  std::size_t make(std::size_t directory, const std::string& name, bool is_directory,
                   const std::filesystem::path& path) {
    const std::size_t node = disk_.nodes.size();
    change({.kind = DiskOperation::Kind::make,
            .node = node,
            .is_directory = is_directory,
            .text = "make the node of " + path.string()});
    change({.kind = DiskOperation::Kind::link,
            .node = directory,
            .name = name,
            .entry = node,
            .text = "create " + path.string()});
    return node;
  }

  void remove_all(const std::filesystem::path& path) {
    const std::size_t node = find(path);
    std::vector<std::string> names;
    for (const auto& [name, entry] : disk_.nodes[node].entries) names.push_back(name);
    for (const std::string& name : names) remove_all(path / name);
    const auto [directory, name] = place(path);
    change({.kind = DiskOperation::Kind::link,
            .node = directory,
            .name = name,
            .text = "remove " + path.string()});
  }

  /// Does it, and writes it down.
  void change(DiskOperation operation) {
    apply(operation, operation.bytes, disk_);
    operations_.push_back(std::move(operation));
  }

  mutable std::mutex mutex_;
  Disk start_;
  Disk disk_;
  std::vector<DiskOperation> operations_;
};

}  // namespace test
