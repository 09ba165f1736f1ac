// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "format.hpp"
#include "progress_bar.hpp"
#include "source.hpp"

#include <shardopt/checkpoint/checkpoint.hpp>
#include <shardopt/checkpoint/diff.hpp>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

namespace tool {

namespace {

namespace checkpoint = shardopt::checkpoint;

const Manual manual{
    .name = "diff",
    .summary = "compares two checkpoints, what they say and every number",
    .synopsis = {"diff [-q] A B"},
    .description =
        {"A and B may be of any numbers of ranks, policies and bucket sizes, generations or merged files: "
         "what is "
         "compared is what training would go on from. Differences are listed one a line: first those of the "
         "manifests (counters, rule, hyper-parameters, types, table of parameters), then each tensor whose "
         "bits "
         "differ, with the number of differing elements, the largest absolute difference (inf where NaN or "
         "infinity "
         "stands on one side), and the first index with both values.",
         "How the content is stored (number of ranks, policy, one file or many) is told as remarks on "
         "standard "
         "error, and is no difference.",
         "B is read twice: first all of it is verified."},
    .exit_status = {{"0", "No difference."},
                    {"1", "There are differences, or one of the two is damaged."},
                    {"2", "The command line is wrong, or a path does not exist."}},
    .examples = {{"shardopt diff runs/a runs/b", "Compares the newest generations of two runs."},
                 {"shardopt diff -q runs/a a.safetensors && echo same", "Tells by the exit status only."}}};

struct Options {
  std::string a;
  std::string b;
  bool quiet = false;
};

void print_difference(const checkpoint::TensorDifference& tensor) {
  const std::string name = checkpoint::merged_name(tensor.parameter, tensor.state);
  const std::string largest = std::isinf(tensor.largest) ? "inf" : print("%.3g", tensor.largest);
  std::printf("%s: %s of %s elements differ, by at most %s; the first is element %s: %.9g in A, %.9g in B\n",
              printable(name).c_str(), with_commas(tensor.differing).c_str(),
              with_commas(tensor.elements).c_str(), largest.c_str(), std::to_string(tensor.first).c_str(),
              static_cast<double>(tensor.first_a), static_cast<double>(tensor.first_b));
}

int run(const Options& options) {
  const auto a = open_checkpoint(options.a, options.quiet);
  const auto b = open_checkpoint(options.b, options.quiet);
  checkpoint::DiffReport report;
  {
    ProgressBar bar("Comparing", options.quiet);
    report = checkpoint::diff(a, b, bar.progress());
  }
  if (options.quiet) return report.same() ? fine : fault;
  print_notes(report.storage);
  for (const std::string& line : report.manifest) std::printf("%s\n", escaped(line).c_str());
  for (const auto& tensor : report.tensors) print_difference(tensor);
  if (report.tensors.empty()) {
    std::printf("%s tensors compared: the same bits%s\n", with_commas(report.tensors_compared).c_str(),
                report.same() ? "" : ", but the manifests differ");
  } else {
    std::printf("%s of %s tensors differ\n",
                with_commas(static_cast<std::int64_t>(report.tensors.size())).c_str(),
                with_commas(report.tensors_compared).c_str());
  }
  return report.same() ? fine : fault;
}

}  // namespace

Command diff_command(CLI::App& program) {
  CLI::App* app = add_command(program, manual);
  const auto options = std::make_shared<Options>();
  add_checkpoint(*app, "A", options->a)->required();
  add_checkpoint(*app, "B", options->b)->required();
  add_quiet(*app, options->quiet);
  return {app, [options] { return run(*options); }};
}

}  // namespace tool
