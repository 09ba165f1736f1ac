// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "block.hpp"
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
  Trainer(const Run& run, Network& network, Optimizer& optimizer, int rank)
      : run_(run), network_(network), optimizer_(optimizer), rank_(rank) {}

  /// Trains for all epochs.
  void train() {
    Progress progress(run_.options.epochs);
    for (int epoch = 0; epoch < run_.options.epochs; ++epoch) {
      network_.use(run_.digits.train, sample_order(run_.digits.train.count(), run_.options.seed, epoch));
      for (int step = 0; step < run_.steps_per_epoch(); ++step) train_step(step);
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
    lrs_.push_back(run_.options.learning_rate() * static_cast<double>(factor));
    collect(std::exchange(pending_, ticket));
  }

  /// Notes a step's loss, over all ranks, and norm. The ticket of the step before the last is asked, so that
  /// the device always has work.
  void collect(const std::optional<shardopt::StepTicket>& ticket) {
    if (!ticket) return;
    const shardopt::StepResult result = ticket->get();
    losses_.push_back((result.scalars[0] + result.scalars[1]) / run_.options.batch);
    norms_.push_back(result.norm);
  }

  /// Rank 0 reports the epoch.
  void end_epoch(int epoch, Progress& progress) {
    collect(std::exchange(pending_, std::nullopt));
    if (rank_ == 0) {
      const int steps = run_.steps_per_epoch();
      for (int step = 0; step < steps && run_.csv.on(); ++step) {
        const auto at = static_cast<std::size_t>(step);
        run_.csv.row(epoch * steps + step + 1, losses_[at], lrs_[at], norms_[at]);
      }
      run_.csv.flush();
      progress.epoch(epoch + 1, std::accumulate(losses_.begin(), losses_.end(), 0.0) / steps, lrs_.back());
    }
    losses_.clear();
    lrs_.clear();
    norms_.clear();
  }

  const Run& run_;
  Network& network_;
  Optimizer& optimizer_;
  int rank_;
  int iteration_ = 0;
  std::vector<double> losses_;  ///< of this epoch's steps: means over the batch
  std::vector<double> lrs_;     ///< likewise
  std::vector<double> norms_;   ///< likewise
  std::optional<shardopt::StepTicket> pending_;
};

}  // namespace mlp
