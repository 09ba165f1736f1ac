// SPDX-License-Identifier: Apache-2.0
#include "digits.hpp"

#include "hash.hpp"
#include "options.hpp"

#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <string_view>
#include <system_error>

namespace mlp {
namespace {

constexpr int rows_published = 1797;
constexpr std::uint64_t hash_published = 0x776869CCE3795967U;
constexpr int columns = Samples::pixels_per_image + 1;

using Row = std::array<std::uint8_t, columns>;

/// The 65 values of a line: pixels of 0 to 16, then a class of 0 to 9.
Row parse_row(std::string_view line, const std::string& place) {
  Row row{};
  const char* at = line.data();
  const char* const end = line.data() + line.size();
  for (std::size_t column = 0; column < row.size(); ++column) {
    const int high = column + 1 == row.size() ? 9 : 16;
    int value = -1;
    const auto [next, error] = std::from_chars(at, end, value);
    if (error != std::errc{} || value < 0 || value > high) {
      throw UsageError(place + ": value " + std::to_string(column + 1) + " of 65 is not a number from 0 to " +
                       std::to_string(high));
    }
    row[column] = static_cast<std::uint8_t>(value);
    const bool last = column + 1 == row.size();
    if (last ? next != end : (next == end || *next != ',')) {
      throw UsageError(place + ": a row has 65 values between commas");
    }
    at = next + 1;
  }
  return row;
}

void append(Samples& samples, const Row& row) {
  for (std::size_t pixel = 0; pixel + 1 < row.size(); ++pixel) {
    samples.pixels.push_back(static_cast<float>(row[pixel]) / 16.0F);
  }
  samples.labels.push_back(row.back());
}

}  // namespace

Digits load_digits(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw UsageError("cannot read the data file '" + path + "': " + std::strerror(errno));
  Digits digits;
  Fnv1a hash;
  int count = 0;
  for (std::string line; std::getline(file, line); ++count) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    const Row row = parse_row(line, path + ":" + std::to_string(count + 1));
    hash.add(row.data(), row.size());
    append(count % 5 == 0 ? digits.test : digits.train, row);
  }
  if (count != rows_published) {
    throw UsageError(path + " is damaged: " + std::to_string(count) + " rows instead of " +
                     std::to_string(rows_published));
  }
  if (hash.value() != hash_published) {
    throw UsageError(path + " is damaged: its values are not those published (hash " + hex(hash.value()) +
                     " instead of " + hex(hash_published) + ")");
  }
  return digits;
}

}  // namespace mlp
