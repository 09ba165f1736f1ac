// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/error.hpp>
#include <shardopt/core/math.hpp>
#include <shardopt/core/range.hpp>
#include <shardopt/core/shape.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace shardopt::inline v0::checkpoint {

/// The version of the format that is written, and the newest that is read.
inline constexpr std::int64_t format_version = 1;

/// Where a rank stands in a dimension of parallelism that is not data parallelism: pipeline stage 0 of 2 is
/// {"pp", 0, 2}. The caller's; part of file names.
struct Coordinate {
  std::string name;        ///< letters and digits
  std::int64_t index = 0;  ///< 0 .. count - 1
  std::int64_t count = 1;
  friend bool operator==(const Coordinate&, const Coordinate&) = default;
};

/// Whether they can be part of file names: each name once, of letters and digits, not "dp", the shard's own;
/// each index below its count.
[[nodiscard]] inline bool are_legal(const std::vector<Coordinate>& coordinates) {
  const auto is_plain = [](char letter) {
    return (letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z') ||
           (letter >= '0' && letter <= '9');
  };
  std::set<std::string_view> names = {"dp"};
  return std::all_of(coordinates.begin(), coordinates.end(), [&](const Coordinate& c) {
    return !c.name.empty() && std::all_of(c.name.begin(), c.name.end(), is_plain) &&
           names.insert(c.name).second && c.count >= 1 && c.index >= 0 && c.index < c.count;
  });
}

/// For people: "pp 0 of 2, tp 1 of 4".
[[nodiscard]] inline std::string text_of(const std::vector<Coordinate>& coordinates) {
  std::string text;
  for (const Coordinate& c : coordinates) {
    text.append(text.empty() ? "" : ", ").append(c.name).append(" ").append(std::to_string(c.index));
    text.append(" of ").append(std::to_string(c.count));
  }
  return text.empty() ? "none" : text;
}

/// A hyper-parameter: a flag, an integer or enumerator, or any other number.
using HyperParameter = std::variant<bool, std::int64_t, double>;

namespace detail {

/// The shortest text that reads back as the same number.
[[nodiscard]] inline std::string text_of_number(double value) {
  std::array<char, 32> text{};
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
}

}  // namespace detail

/// For people: "true", "7", "0.001".
[[nodiscard]] inline std::string text_of(const HyperParameter& value) {
  return std::visit(
      [](auto v) {
        if constexpr (std::is_same_v<decltype(v), bool>) return std::string(v ? "true" : "false");
        if constexpr (std::is_same_v<decltype(v), std::int64_t>) return std::to_string(v);
        return detail::text_of_number(static_cast<double>(v));
      },
      value);
}

/// Whether two are the same to whoever reads them: one NaN is like another.
[[nodiscard]] inline bool same_value(const HyperParameter& a, const HyperParameter& b) {
  const auto is_nan = [](const HyperParameter& value) {
    const auto* number = std::get_if<double>(&value);
    return number != nullptr && math::is_nan(*number);
  };
  return (is_nan(a) && is_nan(b)) || a == b;
}

/// What a checkpoint holds beside the numbers themselves: all that is needed to read it. Text form:
/// docs/checkpoint-format.md.
struct Manifest {
  /// A parameter of the table.
  struct Parameter {
    std::string name;
    Shape shape;
    std::string group;
    bool frozen = false;        ///< has no state
    std::string alias_of = {};  ///< the parameter that it is a second name of, or empty

    /// Number of elements.
    [[nodiscard]] std::int64_t numel() const { return shape.numel(); }
    /// "trainable", "frozen", or "an alias of 'x'".
    [[nodiscard]] std::string kind() const {
      if (!alias_of.empty()) return "an alias of " + shardopt::detail::in_quotes(alias_of);
      return frozen ? "frozen" : "trainable";
    }
    /// Whether states are kept for it.
    [[nodiscard]] bool has_state() const noexcept { return !frozen && alias_of.empty(); }
    friend bool operator==(const Parameter&, const Parameter&) = default;
  };
  /// A group and its hyper-parameters, in the order of the rule.
  struct Group {
    std::string name;
    std::vector<std::pair<std::string, HyperParameter>> hyper_parameters;
    friend bool operator==(const Group&, const Group&) = default;
  };
  /// A run of a parameter's elements in a file.
  struct Piece {
    std::int64_t parameter = 0;  ///< index in `parameters`
    Range range;                 ///< elements of it; not empty
    friend bool operator==(const Piece&, const Piece&) = default;
  };
  /// One rank's file. Each state of `states` is stored for each piece, in this order: state by state.
  struct File {
    std::string name;        ///< without directory
    std::int64_t bytes = 0;  ///< of the whole file
    std::vector<Piece> pieces;
    std::vector<std::uint64_t> checksums;  ///< of its blocks; empty in a merged file
    std::string extra = {};                ///< the rank's own text
    friend bool operator==(const File&, const File&) = default;
  };
  /// A dynamic loss scaler's state.
  struct LossScale {
    float value = 1;
    std::int64_t good_steps = 0;
    std::int32_t hysteresis = 0;
    friend bool operator==(const LossScale&, const LossScale&) = default;
  };

  std::string library_version;
  std::int64_t sequence = 0;  ///< generations of one directory count up
  std::string id;             ///< of this generation: random, the same in all its files
  std::int64_t iteration = 0;
  std::int64_t updates = 0;
  std::optional<LossScale> loss_scale = {};
  std::string rule;
  std::int64_t rule_version = 1;
  std::vector<Group> groups;
  std::string parameter_type;  ///< "fp32", "bf16", …: as the engine stores it; states in files are fp32
  std::string gradient_type;
  std::string sharding;
  std::int64_t world = 1;
  std::vector<Coordinate> coordinates;
  std::vector<Parameter> parameters;          ///< in table order
  std::vector<std::string> states;            ///< in file order; the last is "master", the parameters in fp32
  std::map<std::string, std::string> extras;  ///< the engine's: schedule position, sampler, …
  std::vector<File> files;                    ///< in rank order

  friend bool operator==(const Manifest&, const Manifest&) = default;
};

/// The name of the file in a generation's directory that holds the manifest.
inline constexpr std::string_view manifest_name = "manifest.json";

/// "optimizer_pp-0-of-1_dp-3-of-8.safetensors"
[[nodiscard]] inline std::string shard_name(const std::vector<Coordinate>& coordinates, std::int64_t rank,
                                            std::int64_t world) {
  std::string name = "optimizer";
  const auto add = [&](std::string_view dimension, std::int64_t index, std::int64_t count) {
    name.append("_").append(dimension).append("-").append(std::to_string(index));
    name.append("-of-").append(std::to_string(count));
  };
  for (const Coordinate& c : coordinates) add(c.name, c.index, c.count);
  add("dp", rank, world);
  return name + ".safetensors";
}

}  // namespace shardopt::inline v0::checkpoint
