// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "format.hpp"
#include "memory_plans.hpp"
#include "memory_plot.hpp"
#include "source.hpp"

#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/checkpoint/manifest.hpp>
#include <shardopt/checkpoint/posix_files.hpp>
#include <shardopt/core/parameter_table.hpp>
#include <shardopt/sharding/flat_sharding.hpp>
#include <shardopt/zero/memory_plan.hpp>

#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace tool {

namespace {

namespace so = shardopt;
using so::checkpoint::Manifest;

const Manual manual{
    .name = "plan",
    .summary = "tells the memory that one rank needs, before anything is allocated",
    .synopsis = {"plan --parameters COUNT [OPTION...]", "plan [OPTION...] CHECKPOINT"},
    .description = {"Prints for each rule, precision and number of ranks what rank 0 needs for parameters, "
                    "gradients, optimizer "
                    "states and fp32 masters, and what else the library asks for (staging, tiles, counters): "
                    "the library's own "
                    "MemoryPlan. Activations are not in it, nor what the communication library takes, nor, "
                    "for an ordered "
                    "reduction over NCCL, its workspace of (N-1)/N of a bucket.",
                    "With --parameters the model is one tensor of so many elements. With CHECKPOINT it is "
                    "that checkpoint's "
                    "table of parameters, one behind the other in memory, and rule, precision and sharding "
                    "are those of the "
                    "checkpoint unless others are given.",
                    "Units are decimal: 1 GB is 10^9 bytes."},
    .exit_status = {{"0", "All is well."},
                    {"1", "The checkpoint is damaged, or FILE cannot be written."},
                    {"2", "The command line is wrong, or a path does not exist."}},
    .examples = {
        {"shardopt plan --parameters 7.5B", "A model of 7.5 billion parameters under AdamW."},
        {"shardopt plan --parameters 7.5B --world 1,64 --precision bf16 --json", "Numbers for a script."},
        {"shardopt plan --svg memory.svg runs/a", "Draws the memory of the model that runs/a trains."}}};

struct Options {
  std::string path;
  std::string parameters;
  std::vector<std::int64_t> worlds = {1, 2, 4, 8, 16, 32, 64};
  std::vector<std::string> precisions;
  std::vector<std::string> rules;
  std::string sharding;
  std::string bucket_bytes = "32MiB";
  bool json = false;
  std::string svg;
  bool overwrite = false;
  bool quiet = false;
};

/// A model to plan for, and what it was trained with, if known.
struct Model {
  so::ParameterTable table;
  std::string title;
  std::vector<std::string> rules = {"adamw"};
  std::vector<std::string> precisions = {"fp32", "bf16", "bf16-fp32-grads"};
  std::string sharding = std::string(so::FlatSharding::name);
};

/// The rule and precision names of a checkpoint; empty where they are not the library's.
std::string rule_of(const Manifest& m) {
  if (m.rule == "adamw" || m.rule == "adam") return m.rule;
  if (m.rule == "adamw_amsgrad") return "adamw-amsgrad";
  if (m.rule == "adam_amsgrad") return "adam-amsgrad";
  if (m.rule == "sgd") return m.states.size() > 1 ? "sgd-momentum" : "sgd";
  return "";
}

std::string precision_of(const Manifest& m) {
  return m.parameter_type == m.gradient_type ? m.parameter_type
                                             : m.parameter_type + "-" + m.gradient_type + "-grads";
}

Model model_of(const Manifest& m, const std::string& name) {
  Model model;
  std::int64_t offset = 0;
  for (const auto& parameter : m.parameters) {
    so::ParameterInfo info{.name = parameter.name,
                           .shape = parameter.shape,
                           .group = parameter.group,
                           .frozen = parameter.frozen,
                           .alias_of = parameter.alias_of};
    if (parameter.alias_of.empty()) {
      info.offset = offset;
      offset += parameter.numel();
    }
    model.table.add(info);
  }
  model.title = "the model of " + name;
  model.rules = {rule_of(m)};
  model.precisions = {precision_of(m)};
  model.sharding = m.sharding;
  return model;
}

Model model_of(const Options& options) {
  if (options.path.empty() == options.parameters.empty())
    throw UsageError("give either --parameters COUNT or a CHECKPOINT");
  Model model;
  if (!options.path.empty()) {
    const auto source = open_checkpoint(options.path, options.quiet);
    model = model_of(source.manifest(), options.path);
  } else {
    const std::int64_t count = parse_count(options.parameters, "--parameters");
    model.table.add({.name = "all", .shape = {count}, .offset = 0});
    model.title = with_commas(count) + " parameters";
  }
  if (!options.rules.empty()) model.rules = options.rules;
  if (!options.precisions.empty()) model.precisions = options.precisions;
  if (!options.sharding.empty()) model.sharding = options.sharding;
  if (model.rules.front().empty())
    throw UsageError(
        "the checkpoint's rule is not one of the library's; --rule names one that needs as much");
  return model;
}

/// Lists of slices are held in memory: their number must be reasonable.
void require_few_slices(const so::ParameterTable& table, std::int64_t bucket_bytes, std::int64_t world) {
  constexpr std::int64_t most = 20'000'000;
  const std::int64_t buckets = table.trainable_elements() / (std::max)(bucket_bytes / 4, std::int64_t{1}) + 1;
  if (world <= most / buckets) return;
  throw UsageError("so many parameters in buckets of " + bytes_text(bucket_bytes) + " over " +
                   with_commas(world) +
                   " ranks make too many slices to list; plan with a larger --bucket-bytes");
}

/// All plans of one rule and precision.
struct Series {
  std::string rule;
  std::string precision;
  std::vector<so::MemoryPlan> plans;

  [[nodiscard]] std::string title() const {
    return title_of_rule(rule) + ", " + title_of_precision(precision);
  }
};

std::vector<Series> all_series(const Options& options, const Model& model) {
  const std::int64_t bucket_bytes = parse_bytes(options.bucket_bytes, "--bucket-bytes");
  std::vector<Series> result;
  for (const std::string& rule : model.rules) {
    for (const std::string& precision : model.precisions) {
      Series series{rule, precision, {}};
      for (const std::int64_t world : options.worlds) {
        constexpr std::int64_t max_world = (std::numeric_limits<int>::max)();
        if (world < 1 || world > max_world)
          throw UsageError("--world: numbers of ranks are from 1 to " + with_commas(max_world));
        require_few_slices(model.table, bucket_bytes, world);
        series.plans.push_back(memory_plan(
            model.table, {rule, precision, model.sharding, bucket_bytes, static_cast<int>(world)}));
      }
      result.push_back(std::move(series));
    }
  }
  return result;
}

void print_series(const Series& series) {
  Table table({{"ranks", Table::Align::right},
               {"parameters", Table::Align::right},
               {"gradients", Table::Align::right},
               {"states", Table::Align::right},
               {"masters", Table::Align::right},
               {"sum", Table::Align::right},
               {"B/parameter", Table::Align::right},
               {"unsharded", Table::Align::right},
               {"else", Table::Align::right}});
  for (const so::MemoryPlan& plan : series.plans) {
    const double each = plan.parameters == 0
                            ? 0
                            : static_cast<double>(plan.model_bytes()) / static_cast<double>(plan.parameters);
    table.add({with_commas(plan.world), bytes_text(plan.parameter_bytes), bytes_text(plan.gradient_bytes),
               bytes_text(plan.state_bytes), bytes_text(plan.master_bytes), bytes_text(plan.model_bytes()),
               print("%.3f", each), bytes_text(plan.unsharded_model_bytes()),
               bytes_text(plan.device_bytes + plan.pinned_bytes - plan.state_bytes - plan.master_bytes)});
  }
  std::printf("\n%s\n%s", series.title().c_str(), table.text(2).c_str());
}

nlohmann::ordered_json json_of(const Series& series, const std::string& sharding) {
  nlohmann::ordered_json plans = nlohmann::ordered_json::array();
  for (const so::MemoryPlan& plan : series.plans) {
    plans.push_back({{"rule", series.rule},
                     {"precision", series.precision},
                     {"sharding", sharding},
                     {"world", plan.world},
                     {"parameters", plan.parameters},
                     {"owned_parameters", plan.owned_parameters},
                     {"parameter_bytes", plan.parameter_bytes},
                     {"gradient_bytes", plan.gradient_bytes},
                     {"state_bytes", plan.state_bytes},
                     {"master_bytes", plan.master_bytes},
                     {"model_bytes", plan.model_bytes()},
                     {"unsharded_model_bytes", plan.unsharded_model_bytes()},
                     {"staging_bytes", plan.staging_bytes},
                     {"workspace_bytes", plan.workspace_bytes},
                     {"map_bytes", plan.map_bytes},
                     {"control_bytes", plan.control_bytes},
                     {"device_bytes", plan.device_bytes},
                     {"pinned_bytes", plan.pinned_bytes}});
  }
  return plans;
}

/// Writes beside the place under a hidden name; the file gets its own when it is on stable storage.
/// @throws CheckpointError
void write_file(const std::filesystem::path& path, const std::string& text) {
  auto& files = so::checkpoint::PosixFiles::instance();
  const auto folder = path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
  const auto unfinished =
      folder / (".planning-" + std::to_string(::getpid()) + "-" + path.filename().string());
  try {
    const auto file = files.create(unfinished);
    file->write_at(0, std::as_bytes(std::span(text)));
    file->sync();
    files.rename(unfinished, path);
    files.sync_directory(folder);
  } catch (const so::CheckpointError&) {
    std::error_code ignored;
    std::filesystem::remove(unfinished, ignored);
    throw;
  }
}

void write_svg(const Options& options, const Model& model, const std::vector<Series>& all) {
  std::vector<PlotPanel> panels;
  for (const Series& series : all) panels.push_back({series.title(), series.plans});
  try {
    write_file(options.svg, memory_plot("Memory of one rank, " + model.title, panels));
  } catch (const so::CheckpointError& error) {
    throw std::runtime_error(printable(options.svg) + " cannot be written: " + error.what());
  }
  if (!options.quiet) std::fprintf(stderr, "%s: written\n", escaped(options.svg).c_str());
}

/// @throws UsageError if the output is there, or what is there is not to be replaced
void require_output(const Options& options) {
  std::error_code ignored;
  require_directory_of(options.svg);
  if (!std::filesystem::exists(options.svg, ignored)) return;
  if (!options.overwrite) throw UsageError(printable(options.svg) + " exists; --overwrite replaces it");
  if (!std::filesystem::is_regular_file(options.svg, ignored))
    throw UsageError(printable(options.svg) + " is no regular file");
}

int run(const Options& options) {
  const Model model = model_of(options);
  if (!options.svg.empty()) require_output(options);
  std::vector<Series> all;
  try {
    all = all_series(options, model);
  } catch (const std::invalid_argument& error) {
    throw UsageError(error.what());
  }
  if (!options.svg.empty()) {
    write_svg(options, model, all);
    return fine;
  }
  if (options.json) {
    nlohmann::ordered_json json{{"parameters", model.table.trainable_elements()},
                                {"plans", nlohmann::ordered_json::array()}};
    for (const Series& series : all) {
      for (const auto& plan : json_of(series, model.sharding)) json["plans"].push_back(plan);
    }
    std::printf("%s\n", json.dump(2).c_str());
    return fine;
  }
  std::printf("Memory of rank 0, %s, sharding %s\n", escaped(model.title).c_str(),
              escaped(model.sharding).c_str());
  for (const Series& series : all) print_series(series);
  return fine;
}

}  // namespace

Command plan_command(CLI::App& program) {
  CLI::App* app = add_command(program, manual);
  const auto options = std::make_shared<Options>();
  add_checkpoint(*app, "CHECKPOINT", options->path);
  app->add_option("--parameters", options->parameters, "Trainable elements, such as 7.5B, 125M or 9610.")
      ->type_name("COUNT");
  app->add_option("--world", options->worlds, "Numbers of ranks, separated by commas.")
      ->transform(decimal())
      ->type_name("M,...")
      ->delimiter(',')
      ->default_str("1,2,4,8,16,32,64");
  app->add_option("--precision", options->precisions,
                  "Types of parameters and gradients: " + listed(precision_names()) +
                      ". Without it: fp32, bf16 and bf16-fp32-grads, or the checkpoint's.")
      ->type_name("NAME,...")
      ->delimiter(',');
  app->add_option("--rule", options->rules,
                  "Rules: " + listed(rule_names()) + ". Without it: adamw, or the checkpoint's.")
      ->type_name("NAME,...")
      ->delimiter(',');
  app->add_option("--sharding", options->sharding,
                  "Who owns what: flat, per-parameter or replicated. Without it: flat, or the checkpoint's.")
      ->type_name("POLICY");
  app->add_option("--bucket-bytes", options->bucket_bytes, "Bytes of gradients that are sent as one.")
      ->type_name("N")
      ->capture_default_str();
  auto* json = app->add_flag("--json", options->json, "Prints the plans as JSON, all in bytes.");
  app->add_option("--svg", options->svg,
                  "Draws the plans as stacked bars into FILE instead of printing them.")
      ->type_name("FILE")
      ->excludes(json);
  app->add_flag("--overwrite", options->overwrite, "Replaces FILE if it exists.");
  add_quiet(*app, options->quiet);
  return {app, [options] { return run(*options); }};
}

}  // namespace tool
