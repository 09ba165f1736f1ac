// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"

#include "format.hpp"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace tool {

CLI::App* add_command(CLI::App& program, Manual manual) {
  CLI::App* app = program.add_subcommand(manual.name, manual.summary);
  if (manual.exit_status.empty()) {
    manual.exit_status = {
        {"0", "All is well."},
        {"1", "The checkpoint is damaged, or the work could not be done (disk full, no permission)."},
        {"2",
         "The command line is wrong, a path does not exist, or an output exists already; nothing was done."}};
  }
  set_manual(*app, manual);
  return app;
}

CLI::Option* add_checkpoint(CLI::App& app, const std::string& name, std::string& path) {
  return app.add_option(name, path,
                        "A checkpoint: a directory of generations, one generation, or a merged file.");
}

CLI::Validator decimal() {
  return CLI::Validator(
      [](std::string& text) {
        if (text.empty() || text.find_first_not_of("0123456789") != std::string::npos)
          return printable(text) + " is no whole number";
        text.erase(0, (std::min)(text.find_first_not_of('0'), text.size() - 1));
        return std::string();
      },
      "");
}

void require_directory_of(const std::filesystem::path& file) {
  const std::filesystem::path directory = file.has_parent_path() ? file.parent_path() : ".";
  std::error_code ignored;
  if (!std::filesystem::is_directory(directory, ignored))
    throw UsageError("there is no directory " + printable(directory.string()) + " for " +
                     printable(file.filename().string()));
}

void print_notes(const std::vector<std::string>& notes) {
  for (const std::string& note : notes) std::fprintf(stderr, "note: %s\n", escaped(note).c_str());
}

void add_quiet(CLI::App& app, bool& quiet) {
  app.add_flag("-q,--quiet", quiet, "Says nothing but errors: no progress, no remarks.");
}

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

void refuse_name(const std::string& option, const std::string& name, const std::vector<std::string>& known) {
  throw UsageError(option + ": " + printable(name) + " is not known; there are " + listed(known));
}

}  // namespace tool
