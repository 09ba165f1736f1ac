// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "options.hpp"

#include <shardopt/shardopt.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <map>
#include <string>

namespace mlp {

/// Values by the names of the options that set them, without the dashes.
using Settings = std::map<std::string, std::string>;

/// The shortest text that is read as the same number.
inline std::string shortest(double value) {
  std::array<char, 32> text{};
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
}

inline const char* name_of(ScheduleKind kind) {
  switch (kind) {
    case ScheduleKind::constant:
      return "constant";
    case ScheduleKind::linear:
      return "linear";
    case ScheduleKind::cosine:
      break;
  }
  return "cosine";
}

/// What decides the course of a training, beside the network and the kind of optimizer: a run can only go on
/// with the same. How many ranks and micro-batches share a batch is not among it.
template <class Rule>
Settings settings_of(const Options& options, const Rule& rule) {
  Settings settings{{"batch", std::to_string(options.batch)},
                    {"seed", std::to_string(options.seed)},
                    {"schedule", name_of(options.schedule)},
                    {"warmup", std::to_string(options.warmup)},
                    {"clip", shortest(static_cast<double>(options.clip))}};
  // A constant learning rate does not know when the training ends: it may go on for longer.
  if (options.schedule != ScheduleKind::constant) settings["epochs"] = std::to_string(options.epochs);
  std::size_t at = 0;
  shardopt::for_each_field(rule, [&](auto value) {
    std::string name(shardopt::hyper_parameter_names<Rule>[at++]);
    std::replace(name.begin(), name.end(), '_', '-');
    settings[name] = shortest(static_cast<double>(value));
  });
  return settings;
}

/// What differs: "--seed is 1 there, 2 here; …". Nothing if all is the same.
inline std::string differences_of(const Settings& there, const Settings& here) {
  std::string text;
  for (const auto& [name, value] : here) {
    const auto found = there.find(name);
    if (found != there.end() && found->second == value) continue;
    text += (text.empty() ? "--" : "; --") + name + " is " +
            (found == there.end() ? "missing" : found->second) + " there, " + value + " here";
  }
  return text;
}

/// Joins the lines of a message.
inline std::string one_line(const std::string& text) {
  std::string line;
  for (const char c : text) {
    if (c == '\n') {
      line += line.ends_with(':') ? " " : "; ";
    } else if (c != ' ' || !line.ends_with(' ')) {
      line += c;
    }
  }
  return line;
}

}  // namespace mlp
