// SPDX-License-Identifier: Apache-2.0
/// Trains a multilayer perceptron on handwritten digits: every data-parallel rank keeps its shard of the
/// optimizer state.
#include "csv.hpp"
#include "digits.hpp"
#include "failure.hpp"
#include "hash.hpp"
#include "options.hpp"
#include "run.hpp"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>

namespace {

/// Settles what depends on the machine and the data.
/// @throws mlp::UsageError if they do not allow what was asked for
void settle(mlp::Options& options, const mlp::Digits& digits) {
  using mlp::Backend;
  const int gpus = options.backend == Backend::host ? 0 : mlp::gpus();
  if (options.backend == Backend::automatic) options.backend = gpus > 0 ? Backend::cuda : Backend::host;
  if (options.backend == Backend::cuda) {
    if (!mlp::built_with_cuda()) throw mlp::UsageError("--backend cuda: this program was built without CUDA");
    if (gpus == 0) throw mlp::UsageError("--backend cuda: no GPU answers");
    if (options.ranks > gpus) {
      throw mlp::UsageError("--ranks " + std::to_string(options.ranks) + ": there are only " +
                            std::to_string(gpus) + " GPUs, and each rank needs one");
    }
    if (options.ranks == 0) options.ranks = std::min(4, gpus);
  }
  if (options.ranks == 0) options.ranks = 4;
  const int samples = digits.train.count();
  if (options.batch > samples) {
    throw mlp::UsageError("--batch " + std::to_string(options.batch) + ": there are only " +
                          std::to_string(samples) + " training samples");
  }
  if (static_cast<long long>(options.ranks) * options.micro_batches > options.batch) {
    throw mlp::UsageError("--batch " + std::to_string(options.batch) + ": too few samples for " +
                          std::to_string(options.ranks) + " ranks with " +
                          std::to_string(options.micro_batches) + " micro-batches each");
  }
}

int run(int count, const char* const* arguments) {
  mlp::Options options = mlp::parse_options(count, arguments);
  if (options.help) {
    std::fputs(mlp::help_text().c_str(), stdout);
    return 0;
  }
  if (options.data.empty()) options.data = MLP_DATA_FILE;
  const mlp::Digits digits = mlp::load_digits(options.data);
  settle(options, digits);
  const mlp::Layout layout(options.layers);
  const mlp::Parameters parameters(layout);
  mlp::Csv csv(options.csv);
  const mlp::Run run{
      .options = options, .digits = digits, .layout = layout, .parameters = parameters, .csv = csv};
  const mlp::Result result = options.backend == mlp::Backend::cuda ? mlp::run_cuda(run) : mlp::run_host(run);
  std::printf("test accuracy %.1f %%, weights %s\n", 100.0 * result.accuracy,
              mlp::hex(result.weights).c_str());
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  try {
    return run(count, arguments);
  } catch (...) {
    return mlp::report(std::current_exception());
  }
}
