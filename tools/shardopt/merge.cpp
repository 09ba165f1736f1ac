// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "format.hpp"
#include "progress_bar.hpp"
#include "source.hpp"

#include <shardopt/checkpoint/merge.hpp>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>

namespace tool {

namespace {

const Manual manual{
    .name = "merge",
    .summary = "writes a checkpoint's tensors whole into one safetensors file",
    .synopsis = {"merge [--overwrite] [-q] SOURCE OUTPUT"},
    .description = {"Reads the files of all ranks, checks every block, and writes one file that any "
                    "safetensors reader opens: "
                    "each parameter in fp32 (the master, where training keeps one) under its own name and in "
                    "its shape, its "
                    "optimizer states as NAME/STATE, such as layer.2.weight/exp_avg. Frozen parameters and "
                    "second names of tied "
                    "weights have no numbers in a checkpoint and get none here.",
                    "The metadata hold everything else that was saved: iteration, counters, rule and "
                    "hyper-parameters, the "
                    "table of parameters. So the file is a checkpoint, too: it can be loaded at any number "
                    "of ranks, resharded "
                    "and compared.",
                    "The output is written beside its place under a hidden name (.merging-...) and renamed "
                    "when it is complete "
                    "and on stable storage. If the program is killed that file may stay; it can be removed."},
    .examples = {{"shardopt merge runs/a a.safetensors", "Merges the newest generation of runs/a."},
                 {"shardopt merge runs/a/generation-7-iteration-2000 a.safetensors", "Merges that one."}}};

struct Options {
  std::string source;
  std::string output;
  bool overwrite = false;
  bool quiet = false;
};

int run(const Options& options) {
  const auto source = open_checkpoint(options.source, options.quiet);
  if (source.merged())
    throw UsageError(printable(options.source) + " is one file with whole tensors already");
  if (std::filesystem::path(options.output).extension() != ".safetensors")
    throw UsageError("OUTPUT must end in .safetensors, and " + printable(options.output) + " does not");
  require_directory_of(options.output);
  if (!options.overwrite && std::filesystem::exists(options.output))
    throw UsageError(printable(options.output) + " exists; --overwrite replaces it");
  shardopt::checkpoint::MergeReport report;
  {
    ProgressBar bar("Merging ZeRO-1 shards", options.quiet);
    report = shardopt::checkpoint::merge(source, options.output,
                                         {.overwrite = options.overwrite, .progress = bar.progress()});
  }
  if (options.quiet) return fine;
  print_notes(report.notes);
  std::printf("%s: %s tensors, %s, iteration %s\n", escaped(report.file.string()).c_str(),
              with_commas(report.tensors).c_str(), bytes_text(report.bytes).c_str(),
              with_commas(source.manifest().iteration).c_str());
  return fine;
}

}  // namespace

Command merge_command(CLI::App& program) {
  CLI::App* app = add_command(program, manual);
  const auto options = std::make_shared<Options>();
  app->add_option("SOURCE", options->source, "The checkpoint: a directory of generations, or one generation.")
      ->required();
  app->add_option("OUTPUT", options->output, "The file to write; must end in .safetensors.")->required();
  app->add_flag("--overwrite", options->overwrite, "Replaces OUTPUT if it exists.");
  add_quiet(*app, options->quiet);
  return {app, [options] { return run(*options); }};
}

}  // namespace tool
