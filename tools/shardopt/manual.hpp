// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <utility>
#include <vector>

namespace tool {

/// What --help says about a command beside its options, section by section as in a man page.
struct Manual {
  std::string name;                      ///< "merge"; empty for the program itself
  std::string summary;                   ///< a line without a full stop
  std::vector<std::string> synopsis;     ///< without "shardopt "
  std::vector<std::string> description;  ///< paragraphs
  std::vector<std::pair<std::string, std::string>> exit_status = {};  ///< what a code means
  std::vector<std::pair<std::string, std::string>> examples = {};     ///< command, what it does
};

/// Lets an app answer --help with its manual.
void set_manual(CLI::App& app, const Manual& manual);

}  // namespace tool
