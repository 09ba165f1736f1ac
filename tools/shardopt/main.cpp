// SPDX-License-Identifier: Apache-2.0
/// shardopt COMMAND ...: works on checkpoints without a GPU and without the program that trains.
#include "command.hpp"
#include "format.hpp"

#include <shardopt/core/version.hpp>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

namespace {

const tool::Manual manual{
    .name = "",
    .summary = "looks at checkpoints of sharded optimizers, and makes others of them",
    .synopsis = {"COMMAND [OPTION...] ARGUMENT...", "--help | --version", "COMMAND --help"},
    .description =
        {"A checkpoint is a directory of generations (the newest complete one is taken, and said on standard "
         "error), "
         "one generation's folder, or a merged file: one safetensors file with whole tensors.",
         "No command needs a GPU or the program that trained. None changes a checkpoint that is there: "
         "outputs are "
         "new files, and get their names when they are complete and on stable storage. Memory stays at a few "
         "megabytes, whatever the size. Names are listed in numeric order: layer.2 before layer.10.",
         "Results go to standard output; progress, remarks and errors to standard error."},
    .exit_status = {{"0", "All is well."},
                    {"1", "A fault was found: damage, differences, or the work could not be done."},
                    {"2", "The command line is wrong, a path does not exist, or an output exists already."}},
    .examples = {{"shardopt inspect runs/a", "Says what the newest checkpoint in runs/a holds."},
                 {"shardopt merge runs/a a.safetensors", "Writes its tensors whole into one file."},
                 {"shardopt plan --parameters 7.5B",
                  "Tells the memory of a rank, by number of ranks and precision."}}};

/// The innermost command that was named, for hints.
std::string named_command(const CLI::App& program) {
  const auto parsed = program.get_subcommands();
  return parsed.empty() ? "shardopt" : "shardopt " + parsed.front()->get_name();
}

/// What the library says begins with its own name.
int wrong_usage(const CLI::App& program, const std::string& what) {
  constexpr std::string_view library = "shardopt: ";
  const std::string name = named_command(program);
  const std::string text = tool::escaped(what.starts_with(library) ? what.substr(library.size()) : what);
  std::fprintf(stderr, "%s: %s\nTry '%s --help'.\n", name.c_str(), text.c_str(), name.c_str());
  return tool::usage;
}

/// Says better than the parser what is wrong with the first word, if anything.
void require_command(const std::vector<tool::Command>& commands, int argc, char** argv) {
  std::vector<std::string> names;
  for (const tool::Command& command : commands) names.push_back(command.app->get_name());
  if (argc < 2) throw tool::UsageError("a command is needed: " + tool::listed(names));
  if (std::find(names.begin(), names.end(), argv[1]) != names.end()) return;
  const std::string first = argv[1];
  if (!first.starts_with("-"))
    throw tool::UsageError("there is no command " + tool::printable(first) + "; there are " +
                           tool::listed(names));
}

int run(const std::vector<tool::Command>& commands) {
  for (const tool::Command& command : commands) {
    if (command.app->parsed()) return command.run();
  }
  return tool::usage;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App program{manual.summary};
  tool::set_manual(program, manual);
  program.set_version_flag("--version", "shardopt " + shardopt::text_of(shardopt::version),
                           "Shows the version of the library.");
  program.require_subcommand(1);
  const std::vector<tool::Command> commands{tool::inspect_command(program), tool::verify_command(program),
                                            tool::merge_command(program),   tool::reshard_command(program),
                                            tool::diff_command(program),    tool::plan_command(program)};
  try {
    require_command(commands, argc, argv);
    program.parse(argc, argv);
    const int code = run(commands);
    if (std::fflush(stdout) == 0) return code;
    std::fputs("shardopt: standard output cannot be written\n", stderr);
    return tool::fault;
  } catch (const CLI::CallForHelp&) {
    const auto parsed = program.get_subcommands();
    std::fputs((parsed.empty() ? &program : parsed.front())->help().c_str(), stdout);
    return tool::fine;
  } catch (const CLI::CallForVersion& version) {
    std::printf("%s\n", version.what());
    return tool::fine;
  } catch (const CLI::ParseError& error) {
    return wrong_usage(program, error.what());
  } catch (const tool::UsageError& error) {
    return wrong_usage(program, error.what());
  } catch (const std::exception& error) {
    const std::string text = tool::escaped(error.what());
    std::fprintf(stderr, "%s%s\n", text.starts_with("shardopt: ") ? "" : "shardopt: ", text.c_str());
    return tool::fault;
  }
}
