// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/config.hpp>

#include <stdexcept>
#include <string>
#include <string_view>

namespace shardopt::inline v0 {

/// Where a call stands in the source (clang 14 has no std::source_location).
struct Location {
  /// Source file.
  const char* file;
  /// Function.
  const char* function;
  /// Line in the file.
  int line;

  /// The place that evaluates it; as a default argument, the caller's.
  [[nodiscard]] static constexpr Location current(const char* file = __builtin_FILE(),
                                                  const char* function = __builtin_FUNCTION(),
                                                  int line = __builtin_LINE()) noexcept {
    return {file, function, line};
  }
};

/// Base of what the library throws when something outside it fails. A caller's mistake is
/// std::invalid_argument.
///
/// Layers that know more add it on the way up (`add_context`): the step, the bucket.
class Error : public std::runtime_error {
 public:
  /// @param text  the whole message
  explicit Error(const std::string& text) : std::runtime_error(text), text_(text) {}

  /// Appends "; <context>" to the message.
  void add_context(std::string_view context) { text_.append("; ").append(context); }

  /// The message with all context.
  [[nodiscard]] const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

/// Ranks disagree, or one of them has failed or left: what a collective call reports on every rank.
class CollectiveError : public Error {
 public:
  /// @param text  the whole message
  using Error::Error;
};

namespace detail {

[[nodiscard]] inline std::string text_of(Location where) {
  return std::string(where.function) + " (" + where.file + ":" + std::to_string(where.line) + ")";
}

[[nodiscard]] inline std::string in_quotes(std::string_view name) {
  return std::string("'").append(name).append("'");
}

}  // namespace detail
}  // namespace shardopt::inline v0
