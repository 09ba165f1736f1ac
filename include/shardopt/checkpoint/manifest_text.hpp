// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/checkpoint/checksum.hpp>
#include <shardopt/checkpoint/json.hpp>
#include <shardopt/checkpoint/manifest.hpp>
#include <shardopt/core/counts.hpp>
#include <shardopt/core/math.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace shardopt::inline v0::checkpoint {

namespace detail {

[[nodiscard]] inline Json json_of(const Manifest::Parameter& parameter) {
  Json json{{"name", parameter.name}, {"shape", parameter.shape.dimensions()}, {"group", parameter.group}};
  if (parameter.frozen) json["frozen"] = true;
  if (!parameter.alias_of.empty()) json["alias_of"] = parameter.alias_of;
  return json;
}

[[nodiscard]] inline Json json_of(bool value) { return value; }
[[nodiscard]] inline Json json_of(std::int64_t value) { return value; }
/// JSON has no numbers for what is not finite.
[[nodiscard]] inline Json json_of(double value) {
  if (math::is_finite(value)) return value;
  return math::is_nan(value) ? "nan" : math::less(0.0, value) ? "inf" : "-inf";
}

[[nodiscard]] inline Json json_of(const Manifest::Group& group) {
  Json values = Json::object();
  for (const auto& [name, value] : group.hyper_parameters) {
    std::visit([&, &key = name](auto v) { values[key] = json_of(v); }, value);
  }
  return {{"name", group.name}, {"hyper_parameters", values}};
}

[[nodiscard]] inline Json json_of(const std::vector<Manifest::Piece>& pieces) {
  Json json = Json::array();
  for (const auto& piece : pieces)
    json.push_back(Json::array({piece.parameter, piece.range.begin, piece.range.end}));
  return json;
}

[[nodiscard]] inline Json json_of(const Manifest::File& file) {
  Json checksums = Json::array();
  for (const std::uint64_t value : file.checksums) checksums.push_back(hexadecimal(value));
  Json json{
      {"name", file.name}, {"bytes", file.bytes}, {"pieces", json_of(file.pieces)}, {"checksums", checksums}};
  if (!file.extra.empty()) json["extra"] = file.extra;
  return json;
}

/// All of a manifest but its checksum.
[[nodiscard]] inline Json json_of(const Manifest& m) {
  Json json{{"format", "shardopt-checkpoint"},
            {"format_version", format_version},
            {"library_version", m.library_version},
            {"sequence", m.sequence},
            {"id", m.id},
            {"iteration", m.iteration},
            {"updates", m.updates}};
  if (m.loss_scale) {
    json["loss_scale"] = {{"value", static_cast<double>(m.loss_scale->value)},
                          {"good_steps", m.loss_scale->good_steps},
                          {"hysteresis", m.loss_scale->hysteresis}};
  }
  json["rule"] = {{"name", m.rule}, {"version", m.rule_version}};
  json["groups"] = Json::array();
  for (const auto& group : m.groups) json["groups"].push_back(json_of(group));
  json["precision"] = {{"parameter", m.parameter_type}, {"gradient", m.gradient_type}, {"state", "fp32"}};
  json["sharding"] = m.sharding;
  json["world"] = m.world;
  json["coordinates"] = Json::array();
  for (const auto& c : m.coordinates)
    json["coordinates"].push_back({{"name", c.name}, {"index", c.index}, {"count", c.count}});
  json["parameters"] = Json::array();
  for (const auto& parameter : m.parameters) json["parameters"].push_back(json_of(parameter));
  json["states"] = m.states;
  json["extras"] = Json::object();
  for (const auto& [name, text] : m.extras) json["extras"][name] = text;
  json["checksum_algorithm"] = "xxh3-64";
  json["block_bytes"] = block_bytes;
  json["files"] = Json::array();
  for (const auto& file : m.files) json["files"].push_back(json_of(file));
  return json;
}

/// The checksum stands in the last member, and covers every byte before its digits.
inline constexpr std::string_view checksum_member = ",\n \"checksum\": \"";
inline constexpr std::string_view checksum_end = "\"\n}\n";

[[nodiscard]] inline std::uint64_t checksum_of_text(std::string_view text) noexcept {
  return checksum(std::as_bytes(std::span(text)));
}

[[nodiscard]] inline HyperParameter hyper_parameter_of(const JsonReader& value) {
  if (value.value().is_boolean()) return value.boolean();
  if (value.value().is_number_integer()) return value.integer((std::numeric_limits<std::int64_t>::min)());
  if (!value.value().is_string()) return value.number();
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const std::string text = value.text();
  if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
  if (text != "inf" && text != "-inf") value.refuse("is no number");
  return text == "inf" ? infinity : -infinity;
}

/// A positive number that floats hold.
[[nodiscard]] inline float float_of(const JsonReader& value) {
  const double number = value.number();
  if (number > 0 && number <= static_cast<double>((std::numeric_limits<float>::max)()))
    return static_cast<float>(number);
  value.refuse("must be a positive number of fp32");
}

[[nodiscard]] inline Manifest::Parameter parameter_of(const JsonReader& json) {
  Manifest::Parameter parameter{
      .name = json.at("name").text(), .shape = {}, .group = json.at("group").text()};
  std::vector<std::int64_t> dimensions;
  json.at("shape").for_each([&](const JsonReader& d) { dimensions.push_back(d.integer()); });
  parameter.shape = Shape(dimensions);
  try {
    static_cast<void>(parameter.numel());
  } catch (const std::invalid_argument& error) {
    json.refuse(error.what());
  }
  if (json.has("frozen")) parameter.frozen = json.at("frozen").boolean();
  if (json.has("alias_of")) parameter.alias_of = json.at("alias_of").text();
  return parameter;
}

[[nodiscard]] inline std::uint64_t checksum_from(const JsonReader& json) {
  const std::string text = json.text();
  if (text.size() != 16 || text.find_first_not_of("0123456789abcdef") != std::string::npos)
    json.refuse("must be 16 lower-case hexadecimal digits");
  return std::stoull(text, nullptr, 16);
}

[[nodiscard]] inline Manifest::File file_of(const JsonReader& json) {
  Manifest::File file{
      .name = json.at("name").text(), .bytes = json.at("bytes").integer(), .pieces = {}, .checksums = {}};
  json.at("pieces").for_each([&](const JsonReader& piece) {
    std::vector<std::int64_t> numbers;
    piece.for_each([&](const JsonReader& number) { numbers.push_back(number.integer()); });
    if (numbers.size() != 3) piece.refuse("must be [parameter, begin, end]");
    file.pieces.push_back({numbers[0], {numbers[1], numbers[2]}});
  });
  json.at("checksums").for_each([&](const JsonReader& c) { file.checksums.push_back(checksum_from(c)); });
  if (json.has("extra")) file.extra = json.at("extra").text();
  return file;
}

/// @throws CheckpointError for whatever is missing or of another type. @see require_consistent
[[nodiscard]] inline Manifest manifest_of(const JsonReader& json) {
  if (!json.has("format") || json.at("format").value() != "shardopt-checkpoint")
    json.refuse("is no manifest of a shardopt checkpoint");
  const std::int64_t version = json.at("format_version").integer();
  if (version != format_version) {
    json.refuse("has format version " + std::to_string(version) + "; this library reads version " +
                std::to_string(format_version));
  }
  if (json.at("checksum_algorithm").text() != "xxh3-64" || json.at("block_bytes").integer() != block_bytes ||
      json.at("precision").at("state").text() != "fp32")
    json.refuse("asks for checksums, blocks or states of a kind that this format version does not have");
  Manifest m;
  m.library_version = json.at("library_version").text();
  m.sequence = json.at("sequence").integer();
  m.id = json.at("id").text();
  m.iteration = json.at("iteration").integer(0, max_steps);
  m.updates = json.at("updates").integer(0, max_steps);
  if (json.has("loss_scale")) {
    const JsonReader scale = json.at("loss_scale");
    m.loss_scale = {float_of(scale.at("value")), scale.at("good_steps").integer(),
                    static_cast<std::int32_t>(
                        scale.at("hysteresis").integer(0, (std::numeric_limits<std::int32_t>::max)()))};
  }
  m.rule = json.at("rule").at("name").text();
  m.rule_version = json.at("rule").at("version").integer();
  json.at("groups").for_each([&](const JsonReader& group) {
    m.groups.push_back({group.at("name").text(), {}});
    group.at("hyper_parameters").for_each_member([&](const std::string& name, const JsonReader& value) {
      m.groups.back().hyper_parameters.emplace_back(name, hyper_parameter_of(value));
    });
  });
  m.parameter_type = json.at("precision").at("parameter").text();
  m.gradient_type = json.at("precision").at("gradient").text();
  m.sharding = json.at("sharding").text();
  m.world = json.at("world").integer(1);
  json.at("coordinates").for_each([&](const JsonReader& c) {
    m.coordinates.push_back({c.at("name").text(), c.at("index").integer(), c.at("count").integer(1)});
  });
  json.at("parameters").for_each([&](const JsonReader& p) { m.parameters.push_back(parameter_of(p)); });
  json.at("states").for_each([&](const JsonReader& state) { m.states.push_back(state.text()); });
  json.at("extras").for_each_member(
      [&](const std::string& name, const JsonReader& text) { m.extras[name] = text.text(); });
  json.at("files").for_each([&](const JsonReader& file) { m.files.push_back(file_of(file)); });
  return m;
}

}  // namespace detail

/// The manifest as JSON without its checksum. @param indent  spaces a level; -1: all in one line
/// @throws CheckpointError for names or extras that are not UTF-8
[[nodiscard]] inline std::string json_text(const Manifest& manifest, int indent = -1) {
  return detail::text_of_json(detail::json_of(manifest), "the manifest", indent);
}

/// The manifest as its file holds it. @throws CheckpointError for names or extras that are not UTF-8
[[nodiscard]] inline std::string to_text(const Manifest& manifest) {
  std::string text = json_text(manifest, 1);
  text.resize(text.size() - 2);  // "\n}"
  text += detail::checksum_member;
  return text + hexadecimal(detail::checksum_of_text(text)) + std::string(detail::checksum_end);
}

/// The manifest of a file's text. Checks the checksum and the types of all members, not yet what they say.
/// @param what  names the file in messages  @throws CheckpointError
[[nodiscard]] inline Manifest manifest_from_text(std::string_view text, const std::string& what) {
  using namespace detail;
  const std::size_t tail = 16 + checksum_end.size();
  if (text.size() < tail + checksum_member.size() || !text.ends_with(checksum_end) ||
      !text.substr(0, text.size() - tail).ends_with(checksum_member)) {
    throw CheckpointError("shardopt: " + what +
                          " does not end in its checksum; it is cut short or no manifest");
  }
  const std::string_view covered = text.substr(0, text.size() - tail);
  if (text.substr(covered.size(), 16) != hexadecimal(checksum_of_text(covered)))
    throw CheckpointError("shardopt: " + what + " is damaged: its checksum does not fit");
  const Json json = parse_json(text, what);
  return manifest_of(JsonReader(json, what));
}

}  // namespace shardopt::inline v0::checkpoint
