// SPDX-License-Identifier: Apache-2.0
/// Trains a multilayer perceptron on handwritten digits: every data-parallel rank keeps its shard of the
/// optimizer state.
#include "csv.hpp"
#include "digits.hpp"
#include "failure.hpp"
#include "hash.hpp"
#include "launch.hpp"
#include "options.hpp"
#include "run.hpp"
#include "settle.hpp"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

namespace {

/// @param who  begins this process's messages, once it is known
int run(int count, char* const* arguments, std::string& who) {
  mlp::Options options = mlp::parse_options(count, arguments);
  if (options.help) {
    std::fputs(mlp::help_text().c_str(), stdout);
    return 0;
  }
  const auto place = mlp::find_place(options);
  if (place && place->world > 1) who = "rank " + std::to_string(place->rank) + ": ";
  if (options.data.empty()) options.data = MLP_DATA_FILE;
  const mlp::Digits digits = mlp::load_digits(options.data);
  mlp::settle(options, digits, place);
  const mlp::Layout layout(options.layers);
  const mlp::Parameters parameters(layout);
  const bool starts_others = options.processes > 0 && !place;
  const bool prints = !starts_others && (!place || place->rank == 0);
  mlp::Csv csv(prints ? options.csv : "", options.resume);
  const mlp::Run run{.options = options,
                     .digits = digits,
                     .layout = layout,
                     .parameters = parameters,
                     .csv = csv,
                     .place = place};
  if (starts_others) {
    mlp::check_cuda(run);
    return mlp::launch(options.processes, arguments);
  }
  const mlp::Result result = options.backend == mlp::Backend::cuda ? mlp::run_cuda(run) : mlp::run_host(run);
  if (prints) {
    std::printf("test accuracy %.1f %%, weights %s\n", 100.0 * result.accuracy,
                mlp::hex(result.weights).c_str());
  }
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  std::string who;
  try {
    return run(count, arguments, who);
  } catch (...) {
    const int code = mlp::report(std::current_exception(), who);
    if (!who.empty()) std::_Exit(code);  // one of several: nothing may wait for the others
    return code;
  }
}
