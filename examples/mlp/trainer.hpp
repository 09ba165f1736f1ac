// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "block.hpp"
#include "checkpoints.hpp"
#include "digits.hpp"
#include "hash.hpp"
#include "layout.hpp"
#include "loss_sum.hpp"
#include "progress.hpp"
#include "random.hpp"
#include "run.hpp"
#include "schedule.hpp"

#include <shardopt/shardopt.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

namespace mlp {

/// One rank's training loop, the same for every device, precision, rule and sharding.
template <class Network, class Optimizer>
class Trainer {
 public:
  /// @param iteration  steps that a run before this one has done
  Trainer(const Run& run, Network& network, Optimizer& optimizer, Checkpoints<Optimizer>& checkpoints,
          int rank, int iteration)
      : run_(run),
        network_(network),
        optimizer_(optimizer),
        checkpoints_(checkpoints),
        rank_(rank),
        iteration_(iteration) {}

  /// Trains to the end of the run.
  void train() {
    Progress progress(run_.options.epochs);
    const int steps = run_.steps_per_epoch();
    while (iteration_ < run_.last_iteration()) {
      const int epoch = iteration_ / steps;
      network_.use(run_.digits.train, sample_order(run_.digits.train.count(), run_.options.seed, epoch));
      const int end = std::min((epoch + 1) * steps, run_.last_iteration());
      while (iteration_ < end) {
        train_step(iteration_ - epoch * steps);
        if (checkpoints_.due(iteration_)) save();
      }
      end_epoch(epoch, progress);
    }
  }

  /// The share of test samples that are recognized.
  double test_accuracy() {
    const Samples& test = run_.digits.test;
    std::vector<std::int32_t> order(test.labels.size());
    std::iota(order.begin(), order.end(), 0);
    optimizer_.wait_parameters(network_.stream());
    network_.use(test, order);
    for (int first = 0; first < test.count(); first += run_.largest_block()) {
      network_.load({.first = first, .count = std::min(run_.largest_block(), test.count() - first)});
      for (int layer = 0; layer < run_.layout.depth(); ++layer) network_.forward(layer);
      network_.predict();
    }
    const std::vector<std::int32_t> predicted = network_.predictions();
    const auto hits = std::inner_product(predicted.begin(), predicted.end(), test.labels.begin(), 0,
                                         std::plus<>{}, std::equal_to<>{});
    return static_cast<double>(hits) / test.count();
  }

  /// A hash of all weights and biases, as stored, in the order of layers.
  std::uint64_t weights_hash() {
    optimizer_.wait_parameters(network_.stream());
    const auto flat = network_.download();
    Fnv1a hash;
    for (const Layer& layer : run_.layout.layers) {
      hash.add(flat.data() + layer.weight, static_cast<std::size_t>(layer.weights()) * sizeof(flat[0]));
      hash.add(flat.data() + layer.bias, static_cast<std::size_t>(layer.outputs) * sizeof(flat[0]));
    }
    return hash.value();
  }

 private:
  /// A step whose result has not been asked for.
  struct Pending {
    int iteration;
    double lr;
    shardopt::StepTicket ticket;
  };

  /// One step: every micro-batch adds its gradient once; in the last one each layer is announced as soon as
  /// it is whole.
  void train_step(int step) {
    const Options& options = run_.options;
    LossSum loss{};
    for (int micro = 0; micro < options.micro_batches; ++micro) {
      const bool last = micro + 1 == options.micro_batches;
      const int index = rank_ * options.micro_batches + micro;
      network_.load(block_of(step, options.batch, options.blocks(), index));
      for (int layer = 0; layer < run_.layout.depth(); ++layer) {
        optimizer_.wait_parameters(run_.parameters.of_layer(layer), network_.stream());
        network_.forward(layer);
      }
      network_.loss();
      if (last) loss = network_.sum_losses(block_of(step, options.batch, options.ranks, rank_));
      for (int layer = run_.layout.depth(); layer-- > 0;) {
        network_.backward(layer);
        if (last) optimizer_.gradient_ready(run_.parameters.of_layer(layer), network_.stream());
      }
    }
    const float factor = lr_factor(options.schedule, iteration_, run_.steps(), options.warmup);
    const shardopt::StepTicket ticket =
        optimizer_.step({.lr_factor = factor,
                         .gradient_scale = 1.0F / static_cast<float>(options.batch),
                         .scalars = {loss[0], loss[1]}},
                        network_.stream());
    optimizer_.zero_gradients(network_.stream());
    ++iteration_;
    lr_ = options.learning_rate() * static_cast<double>(factor);
    collect(std::exchange(pending_, Pending{iteration_, lr_, ticket}));
  }

  /// Notes a step's loss, over all ranks, and norm. The ticket of the step before the last is asked, so that
  /// the device always has work.
  void collect(const std::optional<Pending>& step) {
    if (!step) return;
    const shardopt::StepResult result = step->ticket.get();
    losses_.push_back((result.scalars[0] + result.scalars[1]) / run_.options.batch);
    if (rank_ == 0) run_.csv.row(step->iteration, losses_.back(), step->lr, result.norm);
  }

  /// Saves, and with it the table up to here.
  void save() {
    collect(std::exchange(pending_, std::nullopt));
    if (rank_ == 0) run_.csv.flush();
    checkpoints_.save(iteration_);
  }

  /// Rank 0 reports the epoch, or what this run has done of it.
  void end_epoch(int epoch, Progress& progress) {
    collect(std::exchange(pending_, std::nullopt));
    if (rank_ == 0) {
      run_.csv.flush();
      const double loss = std::accumulate(losses_.begin(), losses_.end(), 0.0);
      if (iteration_ == (epoch + 1) * run_.steps_per_epoch())
        progress.epoch(epoch + 1, loss / static_cast<double>(losses_.size()), lr_);
    }
    losses_.clear();
  }

  const Run& run_;
  Network& network_;
  Optimizer& optimizer_;
  Checkpoints<Optimizer>& checkpoints_;
  int rank_;
  int iteration_;               ///< steps done
  double lr_ = 0;               ///< of the last of them
  std::vector<double> losses_;  ///< of this epoch's steps: means over the batch
  std::optional<Pending> pending_;
};

}  // namespace mlp
