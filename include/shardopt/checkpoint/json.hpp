// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/checkpoint_error.hpp>

#include <nlohmann/json.hpp>

#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace shardopt::inline v0::checkpoint::detail {

using namespace shardopt::detail;

/// Members keep their order.
using Json = nlohmann::ordered_json;

/// Deeper files are not ours, and would only cost memory.
inline constexpr int max_json_levels = 32;

/// Parses text that may be damaged or hostile: repeated names and deep nesting are refused.
/// @param what  names the text in messages
/// @param member  is called with the name and value of each member of the outermost object; returns whether
/// it is kept
/// @throws CheckpointError, and what `member` throws
template <class Member>
[[nodiscard]] Json parse_json(std::string_view text, const std::string& what, const Member& member) {
  using Event = Json::parse_event_t;
  const auto refuse = [&](const std::string& why) -> void {
    throw CheckpointError("shardopt: " + what + ": " + why);
  };
  std::vector<std::set<std::string>> names;
  std::string name;  // of the outermost object's member
  const auto watch = [&](int depth, Event event, Json& parsed) {
    if (depth > max_json_levels) refuse("JSON nested more than " + std::to_string(max_json_levels) + " deep");
    if (event == Event::object_start) names.emplace_back();
    if (event == Event::object_end) names.pop_back();
    if (event == Event::key) {
      if (!names.back().insert(parsed.get<std::string>()).second)
        refuse("the name " + parsed.dump() + " occurs twice in one object");
      if (depth == 1) name = parsed.get<std::string>();
    }
    const bool complete = event == Event::value || event == Event::object_end || event == Event::array_end;
    return depth != 1 || !complete || names.empty() || member(name, parsed);
  };
  try {
    return Json::parse(text, watch);
  } catch (const Json::exception& error) {
    refuse(std::string("not JSON: ") + error.what());
  }
  return {};
}

/// Likewise, all of it.
[[nodiscard]] inline Json parse_json(std::string_view text, const std::string& what) {
  return parse_json(text, what, [](const std::string&, const Json&) { return true; });
}

/// @param what  names the text in messages  @throws CheckpointError for bytes that are not UTF-8
[[nodiscard]] inline std::string text_of_json(const Json& json, const std::string& what, int indent = -1) {
  try {
    return json.dump(indent);
  } catch (const Json::exception& error) {
    throw CheckpointError("shardopt: " + what + " cannot be written as JSON: " + error.what());
  }
}

/// Reads members of an object strictly: no conversions, errors that name the place.
class JsonReader {
 public:
  /// @param place  where the value stands, for messages
  JsonReader(const Json& value, std::string place) : value_(&value), place_(std::move(place)) {}

  [[nodiscard]] const std::string& place() const noexcept { return place_; }
  [[nodiscard]] const Json& value() const noexcept { return *value_; }

  [[noreturn]] void refuse(const std::string& why) const {
    throw CheckpointError("shardopt: " + place_ + " " + why);
  }

  [[nodiscard]] bool has(const char* name) const { return object().contains(name); }

  [[nodiscard]] JsonReader at(const char* name) const {
    const auto found = object().find(name);
    if (found == object().end()) refuse("lacks " + in_quotes(name));
    return {*found, place_ + "." + name};
  }

  [[nodiscard]] std::string text() const {
    if (!value_->is_string()) refuse("is no string");
    return value_->get<std::string>();
  }

  [[nodiscard]] bool boolean() const {
    if (!value_->is_boolean()) refuse("is neither true nor false");
    return value_->get<bool>();
  }

  [[nodiscard]] std::int64_t integer(std::int64_t least = 0,
                                     std::int64_t most = (std::numeric_limits<std::int64_t>::max)()) const {
    const bool fits = value_->is_number_unsigned()
                          ? value_->get<std::uint64_t>() <=
                                static_cast<std::uint64_t>((std::numeric_limits<std::int64_t>::max)())
                          : value_->is_number_integer();
    if (!fits || value_->get<std::int64_t>() < least || value_->get<std::int64_t>() > most) {
      refuse("must be an integer from " + std::to_string(least) + " to " + std::to_string(most));
    }
    return value_->get<std::int64_t>();
  }

  [[nodiscard]] double number() const {
    if (!value_->is_number()) refuse("is no number");
    return value_->get<double>();
  }

  /// Calls `read` with each element of an array.
  template <class Read>
  void for_each(const Read& read) const {
    if (!value_->is_array()) refuse("is no array");
    std::size_t index = 0;
    for (const Json& element : *value_)
      read(JsonReader(element, place_ + "[" + std::to_string(index++) + "]"));
  }

  /// Calls `read` with each name and member of an object.
  template <class Read>
  void for_each_member(const Read& read) const {
    for (const auto& [name, member] : object().items()) read(name, JsonReader(member, place_ + "." + name));
  }

 private:
  [[nodiscard]] const Json& object() const {
    if (!value_->is_object()) refuse("is no object");
    return *value_;
  }

  const Json* value_;
  std::string place_;
};

}  // namespace shardopt::inline v0::checkpoint::detail
