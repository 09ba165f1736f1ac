// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "manual.hpp"

#include <CLI/CLI.hpp>

#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace tool {

/// What the program returns.
enum ExitCode : int {
  fine = 0,
  fault = 1,  ///< damage or differences were found, or the work could not be done
  usage = 2,  ///< asked for wrongly: nothing was done
};

/// The command line asks for what makes no sense. The program shows it with a hint to --help, and ends with
/// code 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A command of the program: its options, and what it does.
struct Command {
  CLI::App* app;
  std::function<int()> run;  ///< gives the exit code
};

/// Adds a command and its manual; its options are the caller's to add.
[[nodiscard]] CLI::App* add_command(CLI::App& program, Manual manual);

/// Adds an argument that is a checkpoint of any kind.
CLI::Option* add_checkpoint(CLI::App& app, const std::string& name, std::string& path);

/// Adds -q, --quiet.
void add_quiet(CLI::App& app, bool& quiet);

/// What an option of whole numbers takes: decimal digits, whatever the first; the parser would read others.
[[nodiscard]] CLI::Validator decimal();

/// @throws UsageError if the directory that a file is to lie in does not exist
void require_directory_of(const std::filesystem::path& file);

/// Prints remarks on standard error.
void print_notes(const std::vector<std::string>& notes);

/// "flat, per-parameter"
[[nodiscard]] std::string listed(const std::vector<std::string>& names);

/// @throws UsageError for a name that an option does not know
[[noreturn]] void refuse_name(const std::string& option, const std::string& name,
                              const std::vector<std::string>& known);

[[nodiscard]] Command inspect_command(CLI::App& program);
[[nodiscard]] Command verify_command(CLI::App& program);
[[nodiscard]] Command merge_command(CLI::App& program);
[[nodiscard]] Command reshard_command(CLI::App& program);
[[nodiscard]] Command diff_command(CLI::App& program);
[[nodiscard]] Command plan_command(CLI::App& program);

}  // namespace tool
