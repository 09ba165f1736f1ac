// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "checkpoints.hpp"
#include "digits.hpp"
#include "dispatch.hpp"
#include "layout.hpp"
#include "options.hpp"
#include "parameters.hpp"
#include "report.hpp"
#include "run.hpp"
#include "settings.hpp"
#include "trainer.hpp"

#include <shardopt/shardopt.hpp>

#include <utility>

namespace mlp {

/// The optimizer's configuration: weights decay, biases do not.
template <class Rule, class Sharding>
shardopt::OptimizerConfig<Rule, Sharding> configure(const Run& run, const Rule& rule,
                                                    const Sharding& sharding) {
  Rule plain = rule;
  plain.weight_decay = 0;
  return {.groups = {{"decay", rule}, {"plain", plain}},
          .sharding = sharding,
          .reduction = reduction_of(run.options.reduction),
          .max_norm = run.options.clip};
}

/// Lets the library check what was asked for, before anything starts.
/// @throws std::invalid_argument for settings that it refuses
template <class Precision, class Comm, class Rule, class Sharding>
void check_settings(const Run& run, const Rule& rule, const Sharding& sharding) {
  using Optimizer = shardopt::ZeroOptimizer<Rule, Sharding, Comm, Precision>;
  (void)Optimizer::plan(run.parameters.table, configure(run, rule, sharding),
                        {.rank = 0, .world = run.options.ranks});
}

/// The work of one rank: makes its optimizer beside the engine's network, reports its memory, trains.
/// @param print  shows what this rank has to say, in its turn
/// @return on rank 0 the result, else nothing of use
template <class Precision, class Rule, class Sharding, class Network, class Comm, class Print>
Result run_rank(const Run& run, const Rule& rule, const Sharding& sharding, Network& network, Comm comm,
                const Print& print) {
  using Optimizer = shardopt::ZeroOptimizer<Rule, Sharding, Comm, Precision>;
  const int rank = comm.rank();
  Report report(rank, Network::device_name, Network::memory_in_use);
  auto config = configure(run, rule, sharding);
  config.observer = &report;
  network.initialize(initial_weights(run.layout, run.options.seed));
  Optimizer optimizer(run.parameters.table, config, std::move(comm),
                      shardopt::FlatBuffers{network.parameters(), network.gradients()}, network.stream());
  Checkpoints checkpoints(run, optimizer, network.stream(), settings_of(run.options, rule));
  const int iteration = checkpoints.begin();
  if (rank == 0 && run.options.resume) run.csv.go_on_after(iteration);
  print(report.text());

  Trainer trainer(run, network, optimizer, checkpoints, rank, iteration);
  trainer.train();
  checkpoints.finish();
  Result result;
  if (rank == 0) result = {.accuracy = trainer.test_accuracy(), .weights = trainer.weights_hash()};
  return result;
}

}  // namespace mlp
