// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "block.hpp"
#include "digits.hpp"
#include "hash.hpp"
#include "layout.hpp"
#include "progress.hpp"
#include "random.hpp"
#include "run.hpp"
#include "schedule.hpp"
#include "team.hpp"

#include <shardopt/shardopt.hpp>

#include <algorithm>
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
  Trainer(const Run& run, Network& network, Optimizer& optimizer, Team& team, int rank)
      : run_(run), network_(network), optimizer_(optimizer), team_(team), rank_(rank) {}

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
    for (int micro = 0; micro < options.micro_batches; ++micro) {
      const int index = rank_ * options.micro_batches + micro;
      network_.load(block_of(step, options.batch, options.blocks(), index));
      for (int layer = 0; layer < run_.layout.depth(); ++layer) {
        optimizer_.wait_parameters(run_.parameters.of_layer(layer), network_.stream());
        network_.forward(layer);
      }
      network_.loss();
      for (int layer = run_.layout.depth(); layer-- > 0;) {
        network_.backward(layer);
        if (micro + 1 == options.micro_batches) {
          optimizer_.gradient_ready(run_.parameters.of_layer(layer), network_.stream());
        }
      }
    }
    const float factor = lr_factor(options.schedule, iteration_, run_.steps(), options.warmup);
    const shardopt::StepTicket ticket = optimizer_.step(
        {.lr_factor = factor, .gradient_scale = 1.0F / static_cast<float>(options.batch)}, network_.stream());
    optimizer_.zero_gradients(network_.stream());
    ++iteration_;
    lrs_.push_back(run_.options.learning_rate() * static_cast<double>(factor));
    if (rank_ == 0) collect(std::exchange(pending_, ticket));
  }

  /// Notes a step's norm. The ticket of the step before the last is asked, so that the device always has
  /// work.
  void collect(const std::optional<shardopt::StepTicket>& ticket) {
    if (ticket) norms_.push_back(ticket->get().norm);
  }

  /// Brings the ranks' losses together; rank 0 reports them.
  void end_epoch(int epoch, Progress& progress) {
    const int steps = run_.steps_per_epoch();
    const std::vector<float> own = network_.losses();
    for (int step = 0; step < steps; ++step) {
      for (int micro = 0; micro < run_.options.micro_batches; ++micro) {
        const int index = rank_ * run_.options.micro_batches + micro;
        const Block block = block_of(step, run_.options.batch, run_.options.blocks(), index);
        std::copy_n(own.begin() + block.first, block.count, team_.losses.begin() + block.first);
      }
    }
    team_.meet();
    if (rank_ == 0) {
      collect(std::exchange(pending_, std::nullopt));
      double total = 0;
      for (int step = 0; step < steps; ++step) {
        const auto first = team_.losses.begin() + std::ptrdiff_t{step} * run_.options.batch;
        const double loss = std::accumulate(first, first + run_.options.batch, 0.0) / run_.options.batch;
        total += loss;
        const auto at = static_cast<std::size_t>(step);
        if (run_.csv.on()) run_.csv.row(epoch * steps + step + 1, loss, lrs_[at], norms_[at]);
      }
      run_.csv.flush();
      progress.epoch(epoch + 1, total / steps, lrs_.back());
    }
    lrs_.clear();
    norms_.clear();
    team_.meet();
  }

  const Run& run_;
  Network& network_;
  Optimizer& optimizer_;
  Team& team_;
  int rank_;
  int iteration_ = 0;
  std::vector<double> lrs_;    ///< of this epoch's steps
  std::vector<double> norms_;  ///< likewise, on rank 0
  std::optional<shardopt::StepTicket> pending_;
};

}  // namespace mlp
