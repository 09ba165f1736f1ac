// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "csv.hpp"
#include "digits.hpp"
#include "layout.hpp"
#include "options.hpp"
#include "parameters.hpp"

#include <shardopt/collectives/process_place.hpp>

#include <algorithm>
#include <cstdint>
#include <optional>

namespace mlp {

/// What all ranks of a run read.
struct Run {
  const Options& options;
  const Digits& digits;
  const Layout& layout;
  const Parameters& parameters;
  Csv& csv;                                     ///< rank 0's
  std::optional<shardopt::ProcessPlace> place;  ///< of this process, where ranks are processes

  [[nodiscard]] int steps_per_epoch() const { return digits.train.count() / options.batch; }
  /// Of the whole training: what the schedule goes by.
  [[nodiscard]] int steps() const { return steps_per_epoch() * options.epochs; }
  /// Iterations that are done when this run ends.
  [[nodiscard]] int last_iteration() const {
    return options.stop_after > 0 ? std::min(options.stop_after, steps()) : steps();
  }
  /// Samples of the largest block.
  [[nodiscard]] int largest_block() const {
    return (options.batch + options.blocks() - 1) / options.blocks();
  }
};

/// What a run ends with.
struct Result {
  double accuracy = 0;        ///< share of test samples that are recognized
  std::uint64_t weights = 0;  ///< hash of all weights
};

/// Trains with ranks that are threads of this process, on the host.
Result run_host(const Run& run);

/// GPUs that answer; 0 in a program built without CUDA.
int gpus();

/// Whether the program was built with CUDA.
bool built_with_cuda();

/// Lets the library check the settings, as run_cuda does; touches no GPU.
/// @throws std::invalid_argument for settings that it refuses
void check_cuda(const Run& run);

/// Trains with one GPU a rank. Ranks are threads of this process, or this process is one of them.
Result run_cuda(const Run& run);

}  // namespace mlp
