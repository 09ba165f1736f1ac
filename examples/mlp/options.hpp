// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace mlp {

/// What the caller got wrong: shown in one line, exit code 2.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Backend { automatic, host, cuda };
enum class OptimizerKind { sgd, adam, adamw };
enum class ScheduleKind { constant, linear, cosine };
enum class PrecisionKind { fp32, bf16, bf16_fp32_grads };
enum class ShardingKind { flat, per_parameter };
enum class ReductionKind { automatic, native, ordered };

/// The command line, checked as far as that needs no data and no device.
struct Options {
  Backend backend = Backend::automatic;
  int ranks = 0;      ///< 0: four, or as many as there are GPUs where those are fewer
  int processes = 0;  ///< to start, one rank each; 0: ranks are threads, or the environment tells
  std::optional<double> deadline;  ///< seconds; default: 600 where ranks are processes, else none
  std::vector<int> layers = {64, 128, 10};
  int epochs = 15;
  int batch = 64;  ///< samples of a step, over all ranks and micro-batches
  int micro_batches = 1;

  OptimizerKind optimizer = OptimizerKind::adamw;
  std::optional<double> lr;  ///< default by optimizer
  std::optional<double> weight_decay;
  std::optional<double> momentum;
  std::optional<double> dampening;
  bool nesterov = false;
  std::optional<double> beta1;
  std::optional<double> beta2;
  std::optional<double> eps;

  ScheduleKind schedule = ScheduleKind::cosine;
  int warmup = 0;  ///< steps
  float clip = std::numeric_limits<float>::infinity();

  PrecisionKind precision = PrecisionKind::fp32;
  ShardingKind sharding = ShardingKind::flat;
  ReductionKind reduction = ReductionKind::automatic;
  std::optional<std::int64_t> bucket_bytes;  ///< default: the library's
  int zero = 1;

  std::uint64_t seed = 1;
  std::string data;  ///< default: the file shipped with the example
  std::string csv;

  std::string checkpoint_dir;  ///< empty: nothing is saved
  int save_every = 0;          ///< iterations; 0: only the last of the run
  int keep = 2;                ///< checkpoints; 0: all
  bool resume = false;
  int stop_after = 0;  ///< iterations, counted from the beginning of the training; 0: the whole training
  bool help = false;

  /// The learning rate that the schedule scales.
  [[nodiscard]] double learning_rate() const {
    return lr.value_or(optimizer == OptimizerKind::sgd ? 0.15 : 0.015);
  }

  /// Parts a step's samples are cut into: micro-batch j of rank r works on block r · micro_batches + j.
  [[nodiscard]] int blocks() const { return ranks * micro_batches; }
};

/// Reads the command line.
/// @throws UsageError for an option or value that is not known, out of range or contradictory
Options parse_options(int count, const char* const* arguments);

/// What --help prints.
std::string help_text();

}  // namespace mlp
