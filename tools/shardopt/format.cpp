// SPDX-License-Identifier: Apache-2.0
#include "format.hpp"

#include "command.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace tool {

namespace {

/// Columns that a UTF-8 text takes on a terminal, if none is wide.
std::size_t columns_of(std::string_view text) {
  return static_cast<std::size_t>(std::count_if(
      text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0U) != 0x80U; }));
}

/// Bytes of the UTF-8 character that a text begins with; 0 if it is a control character, or there is none.
std::size_t printable_bytes(std::string_view text) {
  const auto byte = [&](std::size_t k) {
    return k < text.size() ? static_cast<unsigned char>(text[k]) : static_cast<unsigned char>(0);
  };
  const unsigned char first = byte(0);
  if (first < 0x80) return first < 0x20 || first == 0x7f ? 0 : 1;
  if (first < 0xc2 || first > 0xf4) return 0;
  const std::size_t bytes = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  for (std::size_t k = 1; k < bytes; ++k) {
    if ((byte(k) & 0xc0U) != 0x80U) return 0;
  }
  // Terminals obey U+0080 to U+009F, too; and those that decode carelessly take longer forms of characters.
  const bool control = first == 0xc2 && byte(1) < 0xa0;
  const bool longer = (first == 0xe0 && byte(1) < 0xa0) || (first == 0xf0 && byte(1) < 0x90);
  return control || longer ? 0 : bytes;
}

/// A decimal number and what follows it. @return false if there is none
bool split(const std::string& text, double& value, std::string& unit) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  unit = std::string(end, text.data() + text.size());
  return error == std::errc() && std::isfinite(value) && value >= 0;
}

std::int64_t scaled(const std::string& text, const std::string& option,
                    const std::map<std::string, double, std::less<>>& units, const std::string& examples) {
  double value = 0;
  std::string unit;
  const bool number = split(text, value, unit);
  const auto factor = units.find(unit);
  const double result = number && factor != units.end() ? value * factor->second : -1;
  // The text and the product are rounded, each by half of epsilon: 8.03 * 1e9 is a little less than it says.
  const double whole = std::nearbyint(result);
  if (whole > 9e18) throw UsageError(option + ": " + printable(text) + " is too large");
  if (whole < 1 || std::abs(result - whole) > std::numeric_limits<double>::epsilon() * whole)
    throw UsageError(option + ": " + printable(text) + " is no whole number of at least 1, such as " +
                     examples);
  // Plain digits beyond 2^53 are taken exactly.
  std::int64_t exact = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), exact);
  return error == std::errc() && end == text.data() + text.size() ? exact : static_cast<std::int64_t>(whole);
}

}  // namespace

std::string with_commas(std::int64_t value) {
  std::string text = std::to_string(value);
  const std::size_t first = text.starts_with('-') ? 1 : 0;
  for (std::size_t at = text.size(); at > first + 3;) text.insert(at -= 3, ",");
  return text;
}

std::string bytes_text(std::int64_t bytes) {
  constexpr std::array<const char*, 7> units{"B", "kB", "MB", "GB", "TB", "PB", "EB"};
  if (bytes < 1000) return std::to_string(bytes) + " B";
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 999.5 && unit + 1 < units.size(); ++unit) value /= 1000;
  return print("%.*f %s", value < 9.995 ? 2 : value < 99.95 ? 1 : 0, value, units[unit]);
}

std::int64_t parse_count(const std::string& text, const std::string& option) {
  return scaled(text, option, {{"", 1}, {"K", 1e3}, {"M", 1e6}, {"B", 1e9}, {"G", 1e9}, {"T", 1e12}},
                "7.5B, 125M, 1.3e9 or 9610");
}

std::int64_t parse_bytes(const std::string& text, const std::string& option) {
  constexpr double kibi = 1024;
  return scaled(text, option,
                {{"", 1},
                 {"kB", 1e3},
                 {"MB", 1e6},
                 {"GB", 1e9},
                 {"KiB", kibi},
                 {"MiB", kibi * kibi},
                 {"GiB", kibi * kibi * kibi}},
                "32MiB, 50MB or 4096");
}

std::string print(const char* format, ...) {
  std::array<char, 512> text{};
  va_list arguments;
  va_start(arguments, format);
  const int length = std::vsnprintf(text.data(), text.size(), format, arguments);
  va_end(arguments);
  return {text.data(), (std::min)(static_cast<std::size_t>((std::max)(length, 0)), text.size() - 1)};
}

std::string escaped(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const std::size_t bytes = printable_bytes(text);
    result += bytes == 0 ? print("\\x%02x", static_cast<unsigned char>(text.front()))
                         : std::string(text.substr(0, bytes));
    text.remove_prefix((std::max)(bytes, std::size_t{1}));
  }
  return result;
}

std::string escaped_json(const std::string& json) {
  std::string result;
  for (std::size_t k = 0; k < json.size(); ++k) {
    const auto byte = static_cast<unsigned char>(json[k]);
    const auto next = static_cast<unsigned char>(k + 1 < json.size() ? json[k + 1] : '\0');
    if (byte == 0x7f) {
      result += "\\u007f";
    } else if (byte == 0xc2 && next >= 0x80 && next < 0xa0) {
      result += print("\\u%04x", static_cast<unsigned>(next));
      ++k;
    } else {
      result += json[k];
    }
  }
  return result;
}

std::string printable(std::string_view text) { return "'" + escaped(text) + "'"; }

void Table::add(std::vector<std::string> cells) {
  for (std::string& cell : cells) cell = escaped(cell);
  rows_.push_back(std::move(cells));
}

std::string Table::text(std::size_t indent) const {
  std::vector<std::size_t> widths;
  for (const auto& [title, align] : columns_) widths.push_back(columns_of(title));
  for (const auto& row : rows_) {
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = (std::max)(widths[c], columns_of(row[c]));
  }
  const auto line = [&](const auto& cell_of) {
    std::string text(indent, ' ');
    for (std::size_t c = 0; c < columns_.size(); ++c) {
      const std::string& cell = cell_of(c);
      const std::string space(widths[c] - columns_of(cell), ' ');
      text += (c > 0 ? "  " : "") + (columns_[c].second == Align::right ? space + cell : cell + space);
    }
    text.erase(text.find_last_not_of(' ') + 1);
    return text + "\n";
  };
  std::string result = line([&](std::size_t c) -> const std::string& { return columns_[c].first; });
  for (const auto& row : rows_) result += line([&](std::size_t c) -> const std::string& { return row[c]; });
  return result;
}

}  // namespace tool
