// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "format.hpp"
#include "progress_bar.hpp"
#include "source.hpp"

#include <shardopt/checkpoint/checkpoint.hpp>
#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/checkpoint/generations.hpp>
#include <shardopt/checkpoint/numeric_order.hpp>
#include <shardopt/checkpoint/posix_files.hpp>
#include <shardopt/checkpoint/verify.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace tool {

namespace {

namespace checkpoint = shardopt::checkpoint;

const Manual manual{
    .name = "verify",
    .summary = "reads all of a checkpoint and says what is wrong with it",
    .synopsis = {"verify [--all] [-q] CHECKPOINT..."},
    .description =
        {"Checks the manifest and its checksum, that every element of every state is in exactly one file, "
         "that all "
         "files are there, as long as they should be and of this generation, the checksum of each of their "
         "blocks, "
         "and that no other tensor file lies in the folder. All faults are listed, one a line.",
         "A merged file has no checksums: its structure is checked, and that all of it can be read."},
    .exit_status = {{"0", "All that was named is whole."},
                    {"1", "Something is damaged, or there is no complete checkpoint."},
                    {"2", "The command line is wrong, or a path does not exist."}},
    .examples = {{"shardopt verify runs/a", "Reads the newest generation of runs/a."},
                 {"shardopt verify --all runs/a runs/b", "Reads all generations of both."}}};

struct Options {
  std::vector<std::string> paths;
  bool all = false;
  bool quiet = false;
};

/// @return whether it is whole
bool verify_one(const std::filesystem::path& path, bool quiet) {
  std::vector<std::string> problems;
  std::int64_t bytes = 0;
  try {
    const checkpoint::Checkpoint checkpoint(path);
    bytes = checkpoint::total_bytes(checkpoint.manifest());
    ProgressBar bar("Reading " + path.filename().string(), quiet);
    problems = checkpoint::verify(checkpoint, bar.progress());
  } catch (const shardopt::CheckpointError& error) {
    problems = {error.what()};
  }
  std::stable_sort(problems.begin(), problems.end(), checkpoint::numeric_less);
  for (const std::string& problem : problems) std::fprintf(stderr, "%s\n", escaped(problem).c_str());
  if (!quiet) {
    std::printf("%s: %s\n", escaped(path.string()).c_str(),
                problems.empty() ? ("whole, " + bytes_text(bytes)).c_str()
                                 : (with_commas(static_cast<std::int64_t>(problems.size())) + " fault" +
                                    (problems.size() == 1 ? "" : "s"))
                                       .c_str());
  }
  return problems.empty();
}

/// What a path of the command line means. @throws CheckpointError if there is nothing to read
std::vector<std::filesystem::path> paths_of(const std::filesystem::path& path, const Options& options) {
  if (!options.all || !is_directory_of_generations(path)) return {find_checkpoint(path, options.quiet)};
  static_cast<void>(checkpoint::newest(path));  // there is one
  std::vector<std::filesystem::path> paths;
  for (const auto& generation : checkpoint::generations(path, checkpoint::PosixFiles::instance()))
    paths.push_back(generation.path);
  return paths;
}

int run(const Options& options) {
  std::vector<std::filesystem::path> paths;
  bool whole = true;
  for (const std::string& path : options.paths) {
    try {
      const auto meant = paths_of(path, options);
      paths.insert(paths.end(), meant.begin(), meant.end());
    } catch (const shardopt::CheckpointError& error) {  // the others are still read
      std::fprintf(stderr, "%s\n", escaped(error.what()).c_str());
      whole = false;
    }
  }
  for (const auto& path : paths) whole = verify_one(path, options.quiet) && whole;
  return whole ? fine : fault;
}

}  // namespace

Command verify_command(CLI::App& program) {
  CLI::App* app = add_command(program, manual);
  const auto options = std::make_shared<Options>();
  app->add_option("CHECKPOINT", options->paths,
                  "Directories of generations, generations, or merged files; each is read.")
      ->required();
  app->add_flag("--all", options->all,
                "Of a directory reads all generations, the oldest first, not the newest only.");
  add_quiet(*app, options->quiet);
  return {app, [options] { return run(*options); }};
}

}  // namespace tool
