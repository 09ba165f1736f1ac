// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/checksum.hpp>
#include <shardopt/checkpoint/file_system.hpp>
#include <shardopt/checkpoint/manifest.hpp>
#include <shardopt/checkpoint/safetensors.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <future>
#include <memory>
#include <span>
#include <string>

namespace shardopt::inline v0::checkpoint::detail {

/// Writes a file of tensors from its beginning to its end, and keeps its checksums.
class ShardWriter {
 public:
  /// @throws CheckpointError if the file cannot be made
  ShardWriter(FileSystem& files, const std::filesystem::path& path, const SafetensorsHeader& header)
      : file_(files.create(path)) {
    const std::string bytes = to_bytes(header);
    append(std::as_bytes(std::span(bytes)));
  }

  /// Writes what follows. @throws CheckpointError
  void append(std::span<const std::byte> bytes) {
    std::future<void> summing;
    if (bytes.size() < static_cast<std::size_t>(block_bytes)) {
      checksums_.add(bytes);
    } else {
      // Beside the write, which is a copy to the system's memory. Where no thread can start, after it.
      summing = std::async(std::launch::async | std::launch::deferred, [&] { checksums_.add(bytes); });
    }
    file_->write_at(at_, bytes);
    at_ += static_cast<std::int64_t>(bytes.size());
    if (summing.valid()) summing.get();
  }

  /// Returns when the file is on stable storage. @throws CheckpointError
  [[nodiscard]] Manifest::File finish(const std::string& name) {
    file_->sync();
    return {.name = name, .bytes = at_, .pieces = {}, .checksums = checksums_.take()};
  }

 private:
  std::unique_ptr<WritableFile> file_;
  BlockChecksums checksums_;
  std::int64_t at_ = 0;
};

}  // namespace shardopt::inline v0::checkpoint::detail
