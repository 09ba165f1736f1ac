// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "format.hpp"
#include "source.hpp"

#include <shardopt/checkpoint/checkpoint.hpp>
#include <shardopt/checkpoint/generations.hpp>
#include <shardopt/checkpoint/manifest.hpp>
#include <shardopt/checkpoint/manifest_text.hpp>
#include <shardopt/checkpoint/numeric_order.hpp>
#include <shardopt/checkpoint/posix_files.hpp>
#include <shardopt/checkpoint/shard_file.hpp>
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
using checkpoint::Manifest;

const Manual manual{
    .name = "inspect",
    .summary = "says what a checkpoint holds",
    .synopsis = {"inspect [--summary | --json] [-q] CHECKPOINT"},
    .description = {"Prints the iteration and counters, the rule with its hyper-parameters, types, sharding, "
                    "files, and all "
                    "parameters with shape and group, in numeric order of their names. Of a directory of "
                    "generations all are "
                    "listed first.",
                    "Reads what the checkpoint says about itself, and not the numbers: whether those are "
                    "whole is for verify to "
                    "tell."},
    .examples = {{"shardopt inspect runs/a", "Shows the newest generation of runs/a."},
                 {"shardopt inspect --json a.safetensors | jq .iteration", "Takes one value for a script."}}};

struct Options {
  std::string path;
  bool summary = false;
  bool json = false;
  bool quiet = false;
};

void line(const char* what, const std::string& value) {
  std::printf("%-18s %s\n", what, escaped(value).c_str());
}

std::string plural(std::int64_t count, const std::string& what) {
  return with_commas(count) + " " + what + (count == 1 ? "" : "s");
}

void print_head(const checkpoint::Checkpoint& source) {
  const Manifest& m = source.manifest();
  std::int64_t trainable = 0;
  std::int64_t frozen = 0;
  std::int64_t aliases = 0;
  for (const auto& parameter : m.parameters) {
    if (!parameter.alias_of.empty()) {
      ++aliases;
    } else {
      (parameter.frozen ? frozen : trainable) += parameter.numel();
    }
  }
  line("checkpoint", printable(source.path().string()));
  line("kind", source.merged() ? "merged file"
                               : "generation " + std::to_string(m.sequence) + ", " + plural(m.world, "rank") +
                                     ", id " + m.id);
  line("iteration", with_commas(m.iteration) + " (" + with_commas(m.updates) + " updates)");
  line("rule", printable(m.rule) + ", version " + std::to_string(m.rule_version));
  line("types", "parameters " + m.parameter_type + ", gradients " + m.gradient_type + ", states fp32");
  line("states", listed(m.states));
  line("parameters", plural(static_cast<std::int64_t>(m.parameters.size()), "name") + ", " +
                         plural(trainable, "trainable element") +
                         (frozen > 0 ? ", " + plural(frozen, "frozen element") : "") +
                         (aliases > 0 ? ", " + with_commas(aliases) + " tied" : ""));
  line("size", bytes_text(checkpoint::total_bytes(m)));
  line("sharding", printable(m.sharding));
  if (!m.coordinates.empty()) line("coordinates", checkpoint::text_of(m.coordinates));
  if (m.loss_scale)
    line("loss scale", checkpoint::text_of(static_cast<double>(m.loss_scale->value)) + ", " +
                           with_commas(m.loss_scale->good_steps) + " good steps");
  line("written by",
       "shardopt " + m.library_version + ", format version " + std::to_string(checkpoint::format_version));
}

void print_groups(const Manifest& m) {
  std::vector<const Manifest::Group*> groups;
  for (const auto& group : m.groups) groups.push_back(&group);
  std::sort(groups.begin(), groups.end(),
            [](const auto* a, const auto* b) { return checkpoint::numeric_less(a->name, b->name); });
  std::printf("\ngroups\n");
  for (const auto* group : groups) {
    std::vector<std::string> texts;
    for (const auto& [name, value] : group->hyper_parameters)
      texts.push_back(name + " " + checkpoint::text_of(value));
    std::printf("    %s: %s\n", printable(group->name).c_str(), escaped(listed(texts)).c_str());
  }
}

void print_extras(const Manifest& m) {
  if (m.extras.empty()) return;
  std::printf("\nextra texts\n");
  for (const auto& [name, text] : m.extras)
    std::printf("    %s: %s\n", printable(name).c_str(),
                text.size() <= 60 ? printable(text).c_str()
                                  : bytes_text(static_cast<std::int64_t>(text.size())).c_str());
}

void print_files(const checkpoint::Checkpoint& source) {
  if (source.merged()) return;
  Table table({{"file", Table::Align::left},
               {"bytes", Table::Align::right},
               {"elements", Table::Align::right},
               {"pieces", Table::Align::right}});
  for (const auto& file : source.manifest().files) {  // in rank order
    table.add({file.name, with_commas(file.bytes), with_commas(checkpoint::elements_of(file.pieces)),
               with_commas(static_cast<std::int64_t>(file.pieces.size()))});
  }
  std::printf("\nfiles\n%s", table.text(4).c_str());
}

void print_parameters(const Manifest& m) {
  std::vector<const Manifest::Parameter*> parameters;
  for (const auto& parameter : m.parameters) parameters.push_back(&parameter);
  std::sort(parameters.begin(), parameters.end(),
            [](const auto* a, const auto* b) { return checkpoint::numeric_less(a->name, b->name); });
  Table table({{"parameter", Table::Align::left},
               {"shape", Table::Align::left},
               {"elements", Table::Align::right},
               {"group", Table::Align::left}});
  for (const auto* p : parameters) {
    table.add({p->name, p->shape.text(), with_commas(p->numel()),
               !p->alias_of.empty() ? "(is '" + p->alias_of + "')"
               : p->frozen          ? "(frozen)"
                                    : p->group});
  }
  std::printf("\nparameters\n%s", table.text(4).c_str());
}

void print_generations(const std::filesystem::path& directory) {
  const auto all = checkpoint::generations(directory, checkpoint::PosixFiles::instance());
  std::printf("generations in %s\n", printable(directory.string()).c_str());
  for (const auto& generation : all) {
    std::printf("    %s%s\n", generation.path.filename().c_str(),
                &generation == &all.back() ? "  (the newest, shown below)" : "");
  }
  std::printf("\n");
}

int run(const Options& options) {
  const checkpoint::Checkpoint source = open_checkpoint(options.path, options.quiet);
  const Manifest& m = source.manifest();
  if (options.json) {
    std::printf("%s\n", escaped_json(checkpoint::json_text(m, 2)).c_str());
    return fine;
  }
  if (is_directory_of_generations(options.path)) print_generations(options.path);
  print_head(source);
  if (options.summary) return fine;
  print_groups(m);
  print_extras(m);
  print_files(source);
  print_parameters(m);
  return fine;
}

}  // namespace

Command inspect_command(CLI::App& program) {
  CLI::App* app = add_command(program, manual);
  const auto options = std::make_shared<Options>();
  add_checkpoint(*app, "CHECKPOINT", options->path)->required();
  auto* summary = app->add_flag("--summary", options->summary, "Leaves out groups, files and parameters.");
  app->add_flag("--json", options->json, "Prints the manifest as JSON.")->excludes(summary);
  add_quiet(*app, options->quiet);
  return {app, [options] { return run(*options); }};
}

}  // namespace tool
