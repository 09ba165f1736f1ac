// SPDX-License-Identifier: Apache-2.0
#include "options.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <sstream>
#include <string_view>
#include <utility>

namespace mlp {
namespace {

/// One option: its name, its value as the help shows it (empty: takes none), what it does, and how it is
/// read.
struct OptionSpec {
  std::string_view name;
  std::string_view value;
  std::string_view help;
  std::function<void(Options&, std::string_view)> read;
};

[[noreturn]] void refuse(std::string_view option, std::string_view value, std::string_view wanted) {
  std::ostringstream message;
  message << option << ": '" << value << "' is not " << wanted;
  throw UsageError(message.str());
}

template <class Number>
Number number(std::string_view option, std::string_view text, Number low, Number high,
              std::string_view wanted) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || !(value >= low && value <= high)) {
    refuse(option, text, wanted);
  }
  return value;
}

constexpr int most = 1'000'000'000;

auto whole(int Options::*member, std::string_view option, int low, std::string_view wanted) {
  return [=](Options& options, std::string_view text) {
    options.*member = number<int>(option, text, low, most, wanted);
  };
}

auto real(std::optional<double> Options::*member, std::string_view option, double high,
          std::string_view wanted) {
  return [=](Options& options, std::string_view text) {
    options.*member = number<double>(option, text, 0.0, high, wanted);
  };
}

template <class Enum>
auto choice(Enum Options::*member, std::string_view option,
            std::vector<std::pair<std::string_view, Enum>> choices) {
  return [=](Options& options, std::string_view text) {
    std::string wanted = "one of";
    for (const auto& [name, value] : choices) {
      if (name == text) {
        options.*member = value;
        return;
      }
      wanted.append(" ").append(name);
    }
    refuse(option, text, wanted);
  };
}

auto file_name(std::string Options::*member, std::string_view option) {
  return [=](Options& options, std::string_view text) {
    if (text.empty()) refuse(option, text, "a file name");
    options.*member = text;
  };
}

void read_layers(Options& options, std::string_view text) {
  constexpr std::string_view wanted =
      "a list of widths of 1 to 16384 such as 64,128,10 (64 pixels in, 10 classes out)";
  std::vector<int> layers;
  for (std::string_view rest = text;;) {
    const std::size_t comma = rest.find(',');
    layers.push_back(number<int>("--layers", rest.substr(0, comma), 1, 16'384, wanted));
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  if (layers.size() < 2 || layers.front() != 64 || layers.back() != 10) refuse("--layers", text, wanted);
  options.layers = std::move(layers);
}

const std::vector<OptionSpec>& specs() {
  constexpr double huge = 1e30;
  static const std::vector<OptionSpec> all = {
      {"--backend", "host|cuda", "where to train (default: cuda where a GPU answers, else host)",
       choice<Backend>(&Options::backend, "--backend", {{"host", Backend::host}, {"cuda", Backend::cuda}})},
      {"--ranks", "N",
       "data-parallel ranks: threads, or GPUs with one thread each (4, or as many GPUs as there are)",
       whole(&Options::ranks, "--ranks", 1, "a whole number of at least 1")},
      {"--processes", "N",
       "start N processes on this machine, one rank and GPU each (srun, mpirun, torchrun: leave it to them)",
       whole(&Options::processes, "--processes", 1, "a whole number of at least 1")},
      {"--deadline", "SECONDS",
       "on GPUs: give up when no communication has finished for so long; 0: never (processes 600, else 0)",
       real(&Options::deadline, "--deadline", 1e6, "a number from 0 to 1000000")},
      {"--layers", "W,W,…", "widths from the 64 pixels to the 10 classes (64,128,10)", read_layers},
      {"--epochs", "N", "passes over the training samples (15)",
       whole(&Options::epochs, "--epochs", 1, "a whole number of at least 1")},
      {"--batch", "N",
       "samples a step, over all ranks (64); an epoch's last samples that fill no batch are left out",
       whole(&Options::batch, "--batch", 1, "a whole number of at least 1")},
      {"--micro-batches", "N", "gradients accumulated before a step (1)",
       whole(&Options::micro_batches, "--micro-batches", 1, "a whole number of at least 1")},
      {"--optimizer", "sgd|adam|adamw", "update rule (adamw)",
       choice<OptimizerKind>(
           &Options::optimizer, "--optimizer",
           {{"sgd", OptimizerKind::sgd}, {"adam", OptimizerKind::adam}, {"adamw", OptimizerKind::adamw}})},
      {"--lr", "X", "learning rate (sgd 0.15, adam and adamw 0.015)",
       real(&Options::lr, "--lr", huge, "a number of at least 0")},
      {"--weight-decay", "X", "decay of weights, not of biases (adamw 0.01, else 0)",
       real(&Options::weight_decay, "--weight-decay", huge, "a number of at least 0")},
      {"--momentum", "X", "sgd: momentum (0.9)",
       real(&Options::momentum, "--momentum", huge, "a number of at least 0")},
      {"--dampening", "X", "sgd: dampening of the momentum (0)",
       real(&Options::dampening, "--dampening", 1.0, "a number from 0 to 1")},
      {"--nesterov", "", "sgd: Nesterov's momentum",
       [](Options& options, std::string_view) { options.nesterov = true; }},
      {"--beta1", "X", "adam, adamw: decay of the first moment (0.9)",
       real(&Options::beta1, "--beta1", std::nextafter(1.0, 0.0), "a number from 0 to below 1")},
      {"--beta2", "X", "adam, adamw: decay of the second moment (0.999)",
       real(&Options::beta2, "--beta2", std::nextafter(1.0, 0.0), "a number from 0 to below 1")},
      {"--eps", "X", "adam, adamw: added to the denominator (1e-8)",
       real(&Options::eps, "--eps", huge, "a number of at least 0")},
      {"--schedule", "constant|linear|cosine", "learning rate over the run (cosine)",
       choice<ScheduleKind>(&Options::schedule, "--schedule",
                            {{"constant", ScheduleKind::constant},
                             {"linear", ScheduleKind::linear},
                             {"cosine", ScheduleKind::cosine}})},
      {"--warmup", "N", "steps of linear warm-up before it (0)",
       whole(&Options::warmup, "--warmup", 0, "a whole number of at least 0")},
      {"--clip", "X", "largest norm of the gradient (no limit)",
       [](Options& options, std::string_view text) {
         options.clip = number<float>("--clip", text, std::numeric_limits<float>::min(),
                                      std::numeric_limits<float>::infinity(), "a number above 0");
       }},
      {"--precision", "fp32|bf16|bf16-fp32-grads",
       "types of parameters and gradients; bf16 keeps fp32 masters in the optimizer (fp32)",
       choice<PrecisionKind>(&Options::precision, "--precision",
                             {{"fp32", PrecisionKind::fp32},
                              {"bf16", PrecisionKind::bf16},
                              {"bf16-fp32-grads", PrecisionKind::bf16_fp32_grads}})},
      {"--bucket-bytes", "N", "size of one communication (the library's default)",
       [](Options& options, std::string_view text) {
         options.bucket_bytes = number<std::int64_t>("--bucket-bytes", text, 1, std::int64_t{1} << 40,
                                                     "a whole number of at least 1");
       }},
      {"--sharding", "flat|per-parameter", "who owns which elements (flat)",
       choice<ShardingKind>(&Options::sharding, "--sharding",
                            {{"flat", ShardingKind::flat}, {"per-parameter", ShardingKind::per_parameter}})},
      {"--reduction", "native|ordered",
       "how gradients are summed (ordered on the host and for bf16 gradients, else native)",
       choice<ReductionKind>(&Options::reduction, "--reduction",
                             {{"native", ReductionKind::native}, {"ordered", ReductionKind::ordered}})},
      {"--zero", "0|1", "0: every rank keeps the whole optimizer state, 1: its shard (1)",
       [](Options& options, std::string_view text) {
         options.zero = number<int>("--zero", text, 0, 1, "0 or 1");
       }},
      {"--seed", "N", "of the initial weights and the order of samples (1)",
       [](Options& options, std::string_view text) {
         options.seed = number<std::uint64_t>("--seed", text, 0, std::numeric_limits<std::uint64_t>::max(),
                                              "a whole number of at least 0");
       }},
      {"--csv", "FILE",
       "write iteration, loss, learning rate and gradient norm of each step; with --resume go on in it",
       file_name(&Options::csv, "--csv")},
      {"--data", "FILE", "the digits (the copy shipped with this example)",
       file_name(&Options::data, "--data")},
      {"--checkpoint-dir", "DIR", "save checkpoints into this folder: the last iteration of the run is saved",
       file_name(&Options::checkpoint_dir, "--checkpoint-dir")},
      {"--save-every", "N", "save each N iterations, too",
       whole(&Options::save_every, "--save-every", 1, "a whole number of at least 1")},
      {"--keep", "N", "checkpoints that are kept, the newest; 0: all (2)",
       whole(&Options::keep, "--keep", 0, "a whole number of at least 0")},
      {"--resume", "",
       "go on from the newest whole checkpoint in the folder, on any number of ranks; if there is none, "
       "start",
       [](Options& options, std::string_view) { options.resume = true; }},
      {"--stop-after", "N", "end when N iterations are done, those before --resume counted (all epochs)",
       whole(&Options::stop_after, "--stop-after", 1, "a whole number of at least 1")},
      {"--help", "", "print this", [](Options& options, std::string_view) { options.help = true; }},
  };
  return all;
}

const OptionSpec& spec_of(std::string_view name) {
  const auto found =
      std::find_if(specs().begin(), specs().end(), [&](const auto& spec) { return spec.name == name; });
  if (found == specs().end()) throw UsageError("unknown option '" + std::string(name) + "' (see --help)");
  return *found;
}

void refuse_foreign_settings(const Options& options) {
  const bool sgd = options.optimizer == OptimizerKind::sgd;
  const auto check = [&](bool given, bool belongs, std::string_view name, std::string_view owner) {
    if (given && !belongs)
      throw UsageError(std::string(name) + " is a setting of --optimizer " + std::string(owner));
  };
  check(options.momentum.has_value(), sgd, "--momentum", "sgd");
  check(options.dampening.has_value(), sgd, "--dampening", "sgd");
  check(options.nesterov, sgd, "--nesterov", "sgd");
  check(options.beta1.has_value(), !sgd, "--beta1", "adam and adamw");
  check(options.beta2.has_value(), !sgd, "--beta2", "adam and adamw");
  check(options.eps.has_value(), !sgd, "--eps", "adam and adamw");
}

void require_checkpoint_dir(const Options& options) {
  const auto check = [&](bool given, const char* name) {
    if (given && options.checkpoint_dir.empty())
      throw UsageError(std::string(name) + " needs --checkpoint-dir: the folder of the checkpoints");
  };
  check(options.resume, "--resume");
  check(options.save_every != 0, "--save-every");
  check(options.keep != Options().keep, "--keep");
}

}  // namespace

Options parse_options(int count, const char* const* arguments) {
  Options options;
  for (int at = 1; at < count; ++at) {
    const std::string_view argument = arguments[at];
    const std::size_t equals = argument.find('=');
    const OptionSpec& spec = spec_of(argument.substr(0, equals));
    if (spec.value.empty()) {
      if (equals != std::string_view::npos) throw UsageError(std::string(spec.name) + " takes no value");
      spec.read(options, {});
    } else if (equals != std::string_view::npos) {
      spec.read(options, argument.substr(equals + 1));
    } else {
      if (at + 1 == count)
        throw UsageError(std::string(spec.name) + " needs a value: " + std::string(spec.value));
      spec.read(options, arguments[++at]);
    }
  }
  refuse_foreign_settings(options);
  require_checkpoint_dir(options);
  return options;
}

std::string help_text() {
  constexpr std::size_t column = 42;
  std::ostringstream text;
  text << "Trains a multilayer perceptron on handwritten digits with a sharded optimizer.\n\nusage: mlp "
          "[option …]\n\n";
  for (const OptionSpec& spec : specs()) {
    std::string left = "  " + std::string(spec.name);
    if (!spec.value.empty()) left.append(" ").append(spec.value);
    const auto width = static_cast<std::size_t>(std::count_if(
        left.begin(), left.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; }));
    text << left << std::string(width < column ? column - width : 1, ' ') << spec.help << '\n';
  }
  text
      << "\nThe last line of standard output is the accuracy on the test samples and a hash of all weights.\n"
         "Exit code: 0 trained, 1 failed, 2 bad input; with --processes 128 + N if signal N has killed a "
         "process.\n";
  return text.str();
}

}  // namespace mlp
