// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/checkpoint.hpp>
#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/checkpoint/checkpointable.hpp>
#include <shardopt/checkpoint/checksum.hpp>
#include <shardopt/checkpoint/compare.hpp>
#include <shardopt/checkpoint/describe.hpp>
#include <shardopt/checkpoint/extracts.hpp>
#include <shardopt/checkpoint/load_options.hpp>
#include <shardopt/checkpoint/manifest.hpp>
#include <shardopt/checkpoint/memory_advice.hpp>
#include <shardopt/checkpoint/parameter_index.hpp>
#include <shardopt/checkpoint/staging_reader.hpp>
#include <shardopt/checkpoint/verify.hpp>
#include <shardopt/core/counts.hpp>
#include <shardopt/core/error.hpp>
#include <shardopt/core/math.hpp>
#include <shardopt/rules/rule.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace shardopt::inline v0::checkpoint::detail {

/// A rank's part of a checkpoint on its way from files to device memory: read and verified in host memory
/// first, so that a damaged file changes nothing.
template <Checkpointable Optimizer>
class Loading {
 public:
  using Stream = typename Optimizer::Stream;

  Loading(Optimizer& optimizer, const LoadOptions& options, Stream stream)
      : optimizer_(optimizer), options_(options), stream_(stream) {}

  /// Reads what the checkpoint says about itself. @throws CheckpointError
  void open(const std::filesystem::path& path) { checkpoint_.emplace(path, *options_.files); }

  /// Compares that with the optimizer, and prepares what depends on it alone. Waits for what the stream
  /// holds.
  /// @throws CheckpointError
  void compare() {
    here_ = describe(optimizer_, stream_);
    comparison_.emplace(checkpoint_->manifest(), here_, options_);
    comparison_->require_same(in_quotes(checkpoint_->path().string()));
    if (options_.weights_only || !comparison_->same_rule()) return;
    if (!options_.keep_hyper_parameters) prepare_rules();
    prepare_counters();
  }

  /// Reads what this rank keeps, and its share of what no rank keeps, so that every byte is verified by some
  /// rank. @throws CheckpointError
  void read() {
    WantedStates wanted;
    list_wanted(wanted);
    // Not zeroed: every byte is read. What is not covered by a piece was refused when the manifest was read.
    staging_ = std::make_unique_for_overwrite<float[]>(static_cast<std::size_t>(staging_elements_));
    auto* into = reinterpret_cast<std::byte*>(staging_.get());
    prefer_large_pages(into, static_cast<std::size_t>(staging_elements_) * sizeof(float));
    const Manifest& manifest = checkpoint_->manifest();
    if (optimizer_.rank() == 0) require_clean_folder(*checkpoint_);
    std::int64_t unread = 0;
    for (std::size_t k = 0; k < manifest.files.size(); ++k) {
      const std::vector<Extract> extracts = wanted.of_file(*checkpoint_, k);
      const std::vector<bool> mine = share_of_unread(k, unread);
      const bool any = std::find(mine.begin(), mine.end(), true) != mine.end();
      if (extracts.empty() && !any && !is_mine(static_cast<std::int64_t>(k))) continue;
      StagingReader reader(*checkpoint_, k, into);
      reader.read(extracts, [&](std::int64_t block) { return mine[static_cast<std::size_t>(block)]; });
      report_.bytes_read += reader.bytes_read();
    }
  }

  /// Brings all of it to the optimizer. Collective; waits.
  void apply() {
    optimizer_.set_states(targets_, {staging_.get(), static_cast<std::size_t>(staging_elements_)}, stream_);
    for (const auto& [group, rule] : rules_) optimizer_.set_rule(group, rule, stream_);
    if (counters_) optimizer_.set_counters(*counters_, stream_);
    // Who has failed until here is known before the others enqueue what waits for it.
    static_cast<void>(optimizer_.exchange(""));
    optimizer_.restore_parameters(stream_);
    optimizer_.wait_parameters(stream_);
    optimizer_.synchronize(stream_);
  }

  [[nodiscard]] LoadReport report() && {
    const Manifest& m = checkpoint_->manifest();
    report_.generation = checkpoint_->path();
    report_.iteration = m.iteration;
    report_.updates = m.updates;
    report_.world = m.world;
    report_.coordinates = m.coordinates;
    report_.extras = m.extras;
    const auto notes = comparison_->notes();
    report_.notes.insert(report_.notes.begin(), notes.begin(), notes.end());
    const bool any =
        std::any_of(m.files.begin(), m.files.end(), [](const auto& f) { return !f.extra.empty(); });
    if (m.world == optimizer_.world()) {
      report_.rank_extra = m.files[static_cast<std::size_t>(optimizer_.rank())].extra;
    } else if (any) {
      report_.notes.push_back("the texts of single ranks were not given back: " + std::to_string(m.world) +
                              " ranks saved them, " + std::to_string(optimizer_.world()) + " load");
    }
    return std::move(report_);
  }

 private:
  [[nodiscard]] bool is_mine(std::int64_t turn) const {
    return turn % optimizer_.world() == optimizer_.rank();
  }

  void list_wanted(WantedStates& wanted) {
    const Manifest& saved = checkpoint_->manifest();
    const ParameterIndex index(saved);
    for (const auto& run : optimizer_.states()) {
      const std::string state(run.state);
      const std::string parameter(run.parameter);
      if (!comparison_->states().contains(state) || !comparison_->parameters().contains(parameter)) continue;
      wanted.add(index_of(saved.states, state), static_cast<std::int64_t>(*index.find(parameter)), run.range,
                 0, staging_elements_ * static_cast<std::int64_t>(sizeof(float)));
      targets_.push_back(run);
      staging_elements_ += run.range.size();
    }
  }

  [[nodiscard]] static std::size_t index_of(const std::vector<std::string>& names, const std::string& name) {
    return static_cast<std::size_t>(std::find(names.begin(), names.end(), name) - names.begin());
  }

  /// Blocks of a file that no rank wants, one in `world` of them this rank's to verify. @param turn  counts
  /// them over all files
  [[nodiscard]] std::vector<bool> share_of_unread(std::size_t file, std::int64_t& turn) const {
    const Manifest& saved = checkpoint_->manifest();
    const Manifest::File& described = saved.files[file];
    const auto blocks = static_cast<std::size_t>(blocks_in(described.bytes));
    std::vector<bool> wanted(blocks, false);
    const auto offsets = checkpoint_->offsets(file);
    for (std::size_t s = 0; s < offsets.size(); ++s) {
      if (!comparison_->states().contains(saved.states[s])) continue;
      for (std::size_t p = 0; p < described.pieces.size(); ++p) {
        const auto& piece = described.pieces[p];
        const auto& name = saved.parameters[static_cast<std::size_t>(piece.parameter)].name;
        if (!comparison_->parameters().contains(name)) continue;
        const std::int64_t last =
            offsets[s][p] + piece.range.size() * static_cast<std::int64_t>(sizeof(float)) - 1;
        for (std::int64_t b = offsets[s][p] / block_bytes; b <= last / block_bytes; ++b)
          wanted[static_cast<std::size_t>(b)] = true;
      }
    }
    std::vector<bool> mine(blocks, false);
    for (std::size_t b = 0; b < blocks && !checkpoint_->merged(); ++b) {
      if (!wanted[b]) mine[b] = is_mine(turn++);
    }
    return mine;
  }

  /// What set_counters() would refuse is refused before anything changes.
  void prepare_counters() {
    const Manifest& m = checkpoint_->manifest();
    counters_ = optimizer_.counters(stream_);
    counters_->iteration = m.iteration;
    counters_->updates = m.updates;
    if (!m.loss_scale || !here_.loss_scale) return;
    if (!is_loss_scale(m.loss_scale->value) || m.loss_scale->good_steps > max_steps)
      throw CheckpointError(
          "shardopt: " + in_quotes(checkpoint_->path().string()) +
          ": the loss scale is below 2^-126 or infinite, or its count of steps beyond 2^62");
    counters_->loss_scale = m.loss_scale->value;
    counters_->loss_scale_good_steps = m.loss_scale->good_steps;
    counters_->loss_scale_hysteresis = m.loss_scale->hysteresis;
  }

  /// Likewise for set_rule().
  void prepare_rules() {
    for (const auto& saved : checkpoint_->manifest().groups) {
      for (const auto& group : here_.groups) {
        if (group.name != saved.name) continue;
        const auto rule = rule_of(group.name, saved);
        try {
          optimizer_.require_rule(group.name, rule);
        } catch (const std::invalid_argument& error) {
          throw CheckpointError("shardopt: " + in_quotes(checkpoint_->path().string()) + ": " + error.what());
        }
        rules_.emplace_back(group.name, rule);
        note_changes(group, hyper_parameters_of(rule));
      }
    }
  }

  void note_changes(const Manifest::Group& here,
                    const std::vector<std::pair<std::string, HyperParameter>>& loaded) {
    for (std::size_t k = 0; k < loaded.size(); ++k) {
      if (same_value(loaded[k].second, here.hyper_parameters[k].second)) continue;
      report_.notes.push_back("group " + in_quotes(here.name) + ": " + loaded[k].first + " is " +
                              text_of(loaded[k].second) + ", as when it was saved, not " +
                              text_of(here.hyper_parameters[k].second));
    }
  }

  [[nodiscard]] RuleOf<Optimizer> rule_of(const std::string& group, const Manifest::Group& saved) const {
    using Rule = RuleOf<Optimizer>;
    Rule rule = optimizer_.rule(group);
    std::size_t index = 0;
    for_each_field(rule, [&](auto& field) {
      const std::string_view name = hyper_parameter_names<Rule>[index++];
      for (const auto& [saved_name, value] : saved.hyper_parameters) {
        if (saved_name != name) continue;
        if (assign(value, field)) continue;
        throw CheckpointError("shardopt: " + in_quotes(checkpoint_->path().string()) + ": group " +
                              in_quotes(group) + ": " + saved_name + " cannot be " + text_of(value));
      }
    });
    return rule;
  }

  Optimizer& optimizer_;
  const LoadOptions& options_;
  Stream stream_;
  Manifest here_;
  std::optional<Checkpoint> checkpoint_;
  std::optional<Comparison> comparison_;
  std::vector<std::pair<std::string, RuleOf<Optimizer>>> rules_;  ///< of groups, to be set
  std::optional<decltype(std::declval<Optimizer&>().counters(std::declval<Stream>()))> counters_;
  decltype(std::declval<const Optimizer&>().states()) targets_;  ///< what is loaded, in the staging's order
  std::int64_t staging_elements_ = 0;
  std::unique_ptr<float[]> staging_;
  LoadReport report_;
};

}  // namespace shardopt::inline v0::checkpoint::detail
