// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/error.hpp>

#include <filesystem>
#include <string>
#include <system_error>
#include <utility>

namespace shardopt::inline v0 {

/// A checkpoint cannot be written, read, or used as asked. Names the file and what would work; where ranks
/// work together every rank gets it.
class CheckpointError : public Error {
 public:
  /// @param text  the whole message
  /// @param alternative  a generation that is whole, where the one that was asked for is damaged
  explicit CheckpointError(const std::string& text, std::filesystem::path alternative = {})
      : Error(text), alternative_(std::move(alternative)) {}

  /// The newest generation that is whole, if the one that was asked for is damaged and there is another; else
  /// empty.
  [[nodiscard]] const std::filesystem::path& alternative() const noexcept { return alternative_; }

 private:
  std::filesystem::path alternative_;
};

/// What a file system throws where the system refuses a call.
class FileError : public CheckpointError {
 public:
  /// @param text  the whole message  @param code  the system's
  FileError(const std::string& text, std::error_code code) : CheckpointError(text), code_(code) {}

  /// The system's reason.
  [[nodiscard]] std::error_code code() const noexcept { return code_; }

 private:
  std::error_code code_;
};

}  // namespace shardopt::inline v0
