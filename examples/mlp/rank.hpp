// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "digits.hpp"
#include "dispatch.hpp"
#include "layout.hpp"
#include "options.hpp"
#include "parameters.hpp"
#include "report.hpp"
#include "run.hpp"
#include "team.hpp"
#include "trainer.hpp"

#include <shardopt/shardopt.hpp>

#include <utility>

namespace mlp {

/// The work of one rank: makes its optimizer beside the engine's network, reports its memory, trains.
/// @return on rank 0 the result, else nothing of use
template <class Precision, class Rule, class Sharding, class Network, class Comm>
Result run_rank(const Run& run, Rule rule, const Sharding& sharding, Network& network, Comm comm,
                Team& team) {
  using Optimizer = shardopt::ZeroOptimizer<Rule, Sharding, Comm, Precision>;
  const int rank = comm.rank();
  Rule plain = rule;
  plain.weight_decay = 0;
  Report report(rank, Network::device_name, Network::memory_in_use);
  const typename Optimizer::Config config{.groups = {{"decay", rule}, {"plain", plain}},
                                          .sharding = sharding,
                                          .reduction = reduction_of(run.options.reduction),
                                          .max_norm = run.options.clip,
                                          .observer = &report};
  network.initialize(initial_weights(run.layout, run.options.seed));
  Optimizer optimizer(run.parameters.table, config, std::move(comm),
                      shardopt::FlatBuffers{network.parameters(), network.gradients()}, network.stream());
  team.print_in_order(rank, report.text());

  Trainer trainer(run, network, optimizer, team, rank);
  trainer.train();
  Result result;
  if (rank == 0) result = {.accuracy = trainer.test_accuracy(), .weights = trainer.weights_hash()};
  return result;
}

}  // namespace mlp
