// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tool {

/// "1,234,567"
[[nodiscard]] std::string with_commas(std::int64_t value);

/// "1.23 GB": three digits, decimal units.
[[nodiscard]] std::string bytes_text(std::int64_t bytes);

/// A count: "7.5B", "125M", "1.3e9", "10K" or plain digits. @throws UsageError naming `option`
[[nodiscard]] std::int64_t parse_count(const std::string& text, const std::string& option);

/// Bytes: as a count, or with "KiB", "MiB", "GiB". @throws UsageError naming `option`
[[nodiscard]] std::int64_t parse_bytes(const std::string& text, const std::string& option);

/// printf into a string.
[[nodiscard]] __attribute__((format(printf, 1, 2))) std::string print(const char* format, ...);

/// A text that terminals are safe from: bytes of control characters, and those that are no UTF-8, are written
/// as \xNN. Every text that the program does not know itself goes through it.
[[nodiscard]] std::string escaped(std::string_view text);

/// The same for JSON: control characters that JSON allows as they are become \u00NN.
[[nodiscard]] std::string escaped_json(const std::string& json);

/// The same as escaped(), in quotes.
[[nodiscard]] std::string printable(std::string_view text);

/// Rows in columns as wide as needed.
class Table {
 public:
  enum class Align : bool { left, right };

  /// @param columns  title and alignment of each
  explicit Table(std::vector<std::pair<std::string, Align>> columns) : columns_(std::move(columns)) {}
  /// As many cells as columns; they are escaped.
  void add(std::vector<std::string> cells);
  /// With titles, each line behind `indent` spaces.
  [[nodiscard]] std::string text(std::size_t indent) const;

 private:
  std::vector<std::pair<std::string, Align>> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace tool
