// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/checkpoint/file_system.hpp>
#include <shardopt/checkpoint/json.hpp>
#include <shardopt/core/range.hpp>
#include <shardopt/core/shape.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace shardopt::inline v0::checkpoint {

/// The beginning of a safetensors file (https://github.com/huggingface/safetensors): 8 bytes of length, then
/// JSON. All tensors of the files here are "F32".
struct SafetensorsHeader {
  /// A tensor of the file.
  struct Tensor {
    std::string name;
    Shape shape;
    Range bytes;  ///< in the data that follows the header
  };
  std::map<std::string, std::string> metadata = {};
  std::vector<Tensor> tensors = {};  ///< in the order of their data: consecutive from byte 0

  /// Bytes of all data.
  [[nodiscard]] std::int64_t data_bytes() const noexcept {
    return tensors.empty() ? 0 : tensors.back().bytes.end;
  }

  /// Appends a tensor behind the others. @throws std::invalid_argument if it is too large
  void append(std::string name, Shape shape) {
    const std::int64_t begin = data_bytes();
    const std::int64_t bytes = Shape{shape.numel(), static_cast<std::int64_t>(sizeof(float))}.numel();
    tensors.push_back({std::move(name), std::move(shape), {begin, begin + bytes}});
  }
};

/// Data begin at a multiple of this.
inline constexpr std::int64_t data_alignment = 64;

/// Headers end before this, as other readers demand.
inline constexpr std::int64_t max_header_bytes = 100'000'000;

/// Length field and JSON, padded with spaces. @throws CheckpointError for names that are not UTF-8, or too
/// many of them
[[nodiscard]] inline std::string to_bytes(const SafetensorsHeader& header) {
  detail::Json json = detail::Json::object();
  if (!header.metadata.empty()) {
    json["__metadata__"] = detail::Json::object();
    for (const auto& [name, text] : header.metadata) json["__metadata__"][name] = text;
  }
  // Built as text: an ordered object of a hundred thousand members would search all of them for each.
  std::string text = detail::text_of_json(json, "a header");
  text.pop_back();
  for (const auto& tensor : header.tensors) {
    const detail::Json member{{"dtype", "F32"},
                              {"shape", tensor.shape.dimensions()},
                              {"data_offsets", {tensor.bytes.begin, tensor.bytes.end}}};
    if (text.size() > 1) text += ",";
    text += detail::text_of_json(tensor.name, "a tensor's name") + ":" + member.dump();
  }
  text += "}";
  while ((8 + static_cast<std::int64_t>(text.size())) % data_alignment != 0) text += ' ';
  if (static_cast<std::int64_t>(text.size()) > max_header_bytes)
    throw CheckpointError("shardopt: the header of a file would exceed " + std::to_string(max_header_bytes) +
                          " bytes: too many pieces; larger buckets make fewer");
  std::string bytes(8, '\0');
  for (std::size_t k = 0; k < 8; ++k) bytes[k] = static_cast<char>((text.size() >> (8 * k)) & 0xffU);
  return bytes + text;
}

/// The header's length, from the first 8 bytes of a file. @param what  names the file in messages
/// @throws CheckpointError if it does not fit in the file
[[nodiscard]] inline std::int64_t header_bytes_of(std::string_view first_bytes, std::int64_t file_bytes,
                                                  const std::string& what) {
  std::uint64_t length = 0;
  if (first_bytes.size() < 8) throw CheckpointError("shardopt: " + what + " is cut short: it has no header");
  for (std::size_t k = 8; k-- > 0;) length = (length << 8) | static_cast<unsigned char>(first_bytes[k]);
  if (length > static_cast<std::uint64_t>(max_header_bytes) ||
      static_cast<std::int64_t>(length) > file_bytes - 8) {
    throw CheckpointError("shardopt: " + what + " is damaged or cut short: its header claims " +
                          std::to_string(length) + " bytes, the file has " + std::to_string(file_bytes));
  }
  return static_cast<std::int64_t>(length);
}

/// The header's JSON of an open file. @param what  names the file in messages
/// @throws CheckpointError if it does not fit in the file, or cannot be read
[[nodiscard]] inline std::string header_text_of(const ReadableFile& file, const std::string& what) {
  const std::int64_t bytes = file.size();
  std::string start(static_cast<std::size_t>((std::min)(bytes, std::int64_t{8})), '\0');
  file.read_at(0, std::as_writable_bytes(std::span(start)));
  std::string text(static_cast<std::size_t>(header_bytes_of(start, bytes, what)), '\0');
  file.read_at(8, std::as_writable_bytes(std::span(text)));
  return text;
}

/// Parses a header's JSON strictly: F32 only; tensors in any order, their data without gaps or overlaps, to
/// the end of the file.
/// @param data_bytes  what the file holds behind the header  @param what  names the file in messages
/// @throws CheckpointError
[[nodiscard]] inline SafetensorsHeader header_from_json(std::string_view text, std::int64_t data_bytes,
                                                        const std::string& what) {
  using namespace detail;
  SafetensorsHeader header;
  const auto read = [&](const std::string& name, const JsonReader& member) {
    if (name == "__metadata__") {
      member.for_each_member(
          [&](const std::string& key, const JsonReader& value) { header.metadata[key] = value.text(); });
      return;
    }
    if (member.at("dtype").text() != "F32") member.refuse("is not of type F32");
    std::vector<std::int64_t> dimensions;
    std::vector<std::int64_t> offsets;
    member.at("shape").for_each([&](const JsonReader& d) { dimensions.push_back(d.integer()); });
    member.at("data_offsets").for_each([&](const JsonReader& d) {
      offsets.push_back(d.integer(0, data_bytes));
    });
    if (offsets.size() != 2) member.refuse("needs two data_offsets");
    std::int64_t bytes = 0;
    try {
      dimensions.push_back(sizeof(float));
      bytes = Shape(dimensions).numel();
      dimensions.pop_back();
    } catch (const std::invalid_argument& error) {
      member.refuse(error.what());
    }
    if (offsets[1] - offsets[0] != bytes) member.refuse("has data_offsets that do not fit its shape");
    header.tensors.push_back({name, Shape(dimensions), {offsets[0], offsets[1]}});
  };
  // One by one: an ordered object of a hundred thousand members searches all of them for each.
  const Json json = parse_json(text, what, [&](const std::string& name, const Json& value) {
    read(name, JsonReader(value, what + "." + name));
    return false;
  });
  if (!json.is_object()) JsonReader(json, what).refuse("is no object");
  std::stable_sort(header.tensors.begin(), header.tensors.end(), [](const auto& a, const auto& b) {
    return std::pair(a.bytes.begin, a.bytes.end) < std::pair(b.bytes.begin, b.bytes.end);
  });
  std::int64_t at = 0;
  for (const auto& tensor : header.tensors) {
    if (tensor.bytes.begin != at)
      throw CheckpointError("shardopt: " + what + ": the data of " + in_quotes(tensor.name) +
                            " begin at byte " + std::to_string(tensor.bytes.begin) +
                            ", where the tensor before it ends at " + std::to_string(at));
    at = tensor.bytes.end;
  }
  if (at != data_bytes) {
    throw CheckpointError("shardopt: " + what + ": the tensors take " + std::to_string(at) +
                          " bytes, the file holds " + std::to_string(data_bytes) +
                          "; it is cut short, or has bytes that are no tensor's");
  }
  return header;
}

}  // namespace shardopt::inline v0::checkpoint
