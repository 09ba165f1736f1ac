// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "format.hpp"
#include "memory_plans.hpp"
#include "progress_bar.hpp"
#include "source.hpp"

#include <shardopt/checkpoint/reshard.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>

namespace tool {

namespace {

const Manual manual{
    .name = "reshard",
    .summary = "writes a checkpoint again as another number of ranks would have saved it",
    .synopsis = {"reshard --world M [OPTION...] SOURCE DIRECTORY"},
    .description = {"Every checkpoint can be loaded at any number of ranks as it is; then each rank reads "
                    "those files that hold "
                    "its part. After reshard each of M ranks reads its own file only, which helps where "
                    "files are read often or "
                    "from slow storage.",
                    "A new generation is written into DIRECTORY, and is the newest there when it is "
                    "complete. DIRECTORY may be "
                    "the one that SOURCE lies in: the generations that are there stay. No run may be saving "
                    "into it meanwhile.",
                    "POLICY and N are those of the run that will load the result. With others it loads as "
                    "well, but ranks read "
                    "of each other's files."},
    .examples = {{"shardopt reshard --world 16 runs/a runs/a16",
                  "Writes the newest generation of runs/a for 16 ranks into runs/a16."},
                 {"shardopt reshard --world 4 --sharding per-parameter a.safetensors runs/b",
                  "Makes a generation for 4 ranks of a merged file."}}};

struct Options {
  std::string source;
  std::string directory;
  std::int64_t world = 0;
  std::string sharding;
  std::string bucket_bytes = "32MiB";
  bool quiet = false;
};

int run(const Options& options) {
  constexpr std::int64_t max_world = shardopt::checkpoint::ReshardOptions::max_world;
  if (options.world < 1 || options.world > max_world)
    throw UsageError("--world must be from 1 to " + with_commas(max_world));
  const std::int64_t bucket_bytes = parse_bytes(options.bucket_bytes, "--bucket-bytes");
  const auto source = open_checkpoint(options.source, options.quiet);
  const std::string& sharding = options.sharding.empty() ? source.manifest().sharding : options.sharding;
  const auto& known = sharding_names();
  const bool is_known = std::find(known.begin(), known.end(), sharding) != known.end();
  if (!is_known && options.sharding.empty())
    throw UsageError("the source has a sharding policy of the user's, " + printable(sharding) +
                     ": choose another by --sharding");
  if (!is_known) refuse_name("--sharding", sharding, known);
  if (options.directory.empty()) throw UsageError("DIRECTORY must not be empty");
  std::error_code ignored;
  const std::filesystem::path directory = options.directory;
  if (std::filesystem::exists(directory, ignored) && !is_directory_of_generations(directory))
    throw UsageError(printable(options.directory) +
                     " is no directory for generations: give a new one, or one that holds some");
  shardopt::checkpoint::ReshardReport report;
  try {
    ProgressBar bar("Resharding to " + with_commas(options.world) + (options.world == 1 ? " rank" : " ranks"),
                    options.quiet);
    report = shardopt::checkpoint::reshard(source, directory,
                                           {.world = options.world,
                                            .sharding = options.sharding,
                                            .bucket_bytes = bucket_bytes,
                                            .progress = bar.progress()});
  } catch (const std::invalid_argument& error) {
    throw UsageError(error.what());
  }
  if (options.quiet) return fine;
  print_notes(report.notes);
  std::printf("%s: %s, iteration %s, %s to %s ranks\n", escaped(report.generation.string()).c_str(),
              bytes_text(report.bytes).c_str(), with_commas(source.manifest().iteration).c_str(),
              with_commas(source.manifest().world).c_str(), with_commas(options.world).c_str());
  return fine;
}

}  // namespace

Command reshard_command(CLI::App& program) {
  CLI::App* app = add_command(program, manual);
  const auto options = std::make_shared<Options>();
  add_checkpoint(*app, "SOURCE", options->source)->required();
  app->add_option("DIRECTORY", options->directory,
                  "The directory that gets a new generation; made if need be.")
      ->required();
  app->add_option("--world", options->world, "The number of ranks.")
      ->required()
      ->transform(decimal())
      ->type_name("M");
  app->add_option("--sharding", options->sharding,
                  "Who owns what: flat, per-parameter or replicated. Without it: as in SOURCE.")
      ->type_name("POLICY");
  app->add_option(
         "--bucket-bytes", options->bucket_bytes,
         "Bytes of gradients that are sent as one, such as 32MiB or 4096: the policy's bucket_bytes.")
      ->type_name("N")
      ->capture_default_str();
  add_quiet(*app, options->quiet);
  return {app, [options] { return run(*options); }};
}

}  // namespace tool
