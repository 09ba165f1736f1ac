// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint.hpp>
#include <support/small_engine.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

/// A small training run whose state at each iteration is known, for tests of its checkpoints.
namespace test {

namespace ckpt = so::checkpoint;

/// Where tests that own their whole file system save to.
inline const std::filesystem::path run_directory = "/runs/a/checkpoints";

/// Two groups with unequal hyper-parameters, awkward sizes, an empty, a frozen and a tied parameter.
[[nodiscard]] inline so::ParameterTable checkpoint_table() {
  return packed_table({{"embedding", {37, 19}, "decay"},
                       {"empty", {0, 3}, "plain"},
                       {"bias", {1}, "plain"},
                       {"table", {5}, "plain", true},
                       {"scale", {257}, "plain"},
                       {"head", {37, 19}, "decay", false, "embedding"},
                       {"last", {300}, "decay"}});
}

/// Buckets of 1 KiB: several.
template <class Optimizer>
[[nodiscard]] typename Optimizer::Config checkpoint_config() {
  typename Optimizer::Config config;
  config.groups = {{"decay", {.lr = 1e-2, .weight_decay = 0.1}}, {"plain", {.lr = 3e-3, .beta1 = 0.8}}};
  config.sharding.bucket_bytes = 1024;
  return config;
}

/// All that a checkpoint must bring back.
struct Snapshot {
  std::int64_t iteration = 0;
  std::int64_t updates = 0;
  std::vector<std::uint32_t> bits;  ///< of parameters, then of all states, whole
  friend bool operator==(const Snapshot&, const Snapshot&) = default;
};

/// A rank that trains: the gradients depend on iteration and element alone, so that every world computes the
/// same.
template <class Optimizer>
class CheckpointEngine : public Engine<Optimizer> {
 public:
  template <class Comm>
  CheckpointEngine(const so::ParameterTable& table, const typename Optimizer::Config& config, Comm comm)
      : Engine<Optimizer>(table, config, std::move(comm), 0.5) {}
  template <class Comm>
  explicit CheckpointEngine(Comm comm)
      : CheckpointEngine(checkpoint_table(), checkpoint_config<Optimizer>(), std::move(comm)) {}

  void train(std::int64_t steps = 1) {
    for (; steps > 0; --steps) {
      const auto n = static_cast<double>(this->optimizer.counters({}).iteration);
      this->set_gradients([n](std::int64_t i) {
        return static_cast<double>((i * 7919 + static_cast<std::int64_t>(n) * 104729) % 251 - 125) / 64;
      });
      this->step({.lr_factor = static_cast<float>(1 / (1 + n)),
                  .gradient_scale = 1.0f / static_cast<float>(this->optimizer.world())});
    }
  }

  /// Some steps, then a checkpoint in run_directory. Collective.
  void train_and_save(std::int64_t steps, ckpt::FileSystem& files, ckpt::SaveOptions options = {}) {
    train(steps);
    options.files = &files;
    ckpt::save(this->optimizer, run_directory, options, {});
  }

  /// Whole, on every rank 0; of this rank alone elsewhere. Collective.
  [[nodiscard]] Snapshot snapshot() {
    const auto counters = this->optimizer.counters({});
    Snapshot result{counters.iteration, counters.updates, {}};
    for (const auto p : this->parameters) result.bits.push_back(bits_of(p));
    for (const auto& state : this->optimizer.gather_state(0, {})) {
      for (const float value : state.values) result.bits.push_back(bits_of(value));
    }
    return result;
  }

  /// What this rank keeps, bit by bit: to see that nothing changed. Not collective.
  [[nodiscard]] Snapshot own_snapshot() const {
    const auto counters = this->optimizer.counters({});
    Snapshot result{counters.iteration, counters.updates, {}};
    for (const auto p : this->parameters) result.bits.push_back(bits_of(p));
    for (const auto& run : this->optimizer.states()) {
      for (std::int64_t i = 0; i < run.range.size(); ++i) result.bits.push_back(bits_of(run.data[i]));
    }
    return result;
  }
};

using CheckpointAdam = ThreadsOptimizer<so::AdamW>;
using AdamEngine = CheckpointEngine<CheckpointAdam>;

/// What a run is like after each number of steps, 0 first. By one rank: sharded equals unsharded.
[[nodiscard]] inline std::vector<Snapshot> plain_run(std::int64_t steps) {
  return on_ranks(1,
                  [&](HostThreads comm) {
                    CheckpointEngine<CheckpointAdam> engine(std::move(comm));
                    std::vector<Snapshot> run = {engine.snapshot()};
                    for (std::int64_t k = 0; k < steps; ++k) {
                      engine.train();
                      run.push_back(engine.snapshot());
                    }
                    return run;
                  })
      .front();
}

}  // namespace test
