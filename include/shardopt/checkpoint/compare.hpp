// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/checkpoint/load_options.hpp>
#include <shardopt/checkpoint/manifest.hpp>
#include <shardopt/checkpoint/parameter_index.hpp>
#include <shardopt/core/error.hpp>

#include <algorithm>
#include <cstddef>
#include <set>
#include <string>
#include <vector>

namespace shardopt::inline v0::checkpoint::detail {

/// What of a checkpoint an optimizer will take, and what differs between the two.
class Comparison {
 public:
  /// @param saved  the checkpoint's  @param here  what the optimizer would save
  Comparison(const Manifest& saved, const Manifest& here, const LoadOptions& options)
      : saved_(saved), here_(here), in_saved_(saved), in_here_(here), options_(options) {
    if (!options.weights_only) compare_rule();
    if (!same_rule_)
      notes_.push_back("states, counters and hyper-parameters stay: the checkpoint's are another rule's");
    compare_states();
    compare_parameters();
    note_what_may_differ();
  }

  /// @throws CheckpointError for other coordinates than the options ask for; and one that lists what differs,
  /// unless they are lenient
  void require_same(const std::string& what) const {
    if (options_.coordinates && *options_.coordinates != saved_.coordinates)
      throw CheckpointError("shardopt: " + what + " is of other coordinates than LoadOptions.coordinates: " +
                            text_of(saved_.coordinates) + ", not " + text_of(*options_.coordinates));
    if (differences_.empty() || options_.lenient) return;
    std::string text = "shardopt: " + what + " is not of this optimizer:";
    for (std::size_t k = 0; k < differences_.size() && k < most_told; ++k) text += "\n  " + differences_[k];
    if (differences_.size() > most_told)
      text += "\n  and " + std::to_string(differences_.size() - most_told) + " more differences";
    throw CheckpointError(text + "\n(LoadOptions::lenient loads what both have)");
  }

  /// What was not refused.
  [[nodiscard]] std::vector<std::string> notes() const {
    std::vector<std::string> all = notes_;
    all.insert(all.end(), differences_.begin(), differences_.end());
    return all;
  }

  /// Names of the states that can be taken.
  [[nodiscard]] const std::set<std::string>& states() const noexcept { return states_; }
  /// Names of the parameters whose state can be taken.
  [[nodiscard]] const std::set<std::string>& parameters() const noexcept { return parameters_; }
  /// Whether the rules are the same, so that counters and hyper-parameters mean the same.
  [[nodiscard]] bool same_rule() const noexcept { return same_rule_; }

 private:
  static constexpr std::size_t most_told = 20;

  void differ(const std::string& what, const std::string& saved, const std::string& here) {
    differences_.push_back(what + ": " + saved + " in the checkpoint, " + here + " here");
  }

  void compare_rule() {
    const auto named = [](const Manifest& m) {
      return in_quotes(m.rule) + " version " + std::to_string(m.rule_version);
    };
    same_rule_ = saved_.rule == here_.rule && saved_.rule_version == here_.rule_version;
    if (!same_rule_) differ("rule", named(saved_), named(here_));
    compare_groups(here_, saved_, "is not in the checkpoint");
    compare_groups(saved_, here_, "is in the checkpoint only");
  }

  /// Which groups, and hyper-parameters of groups, `some` have and `others` lack.
  void compare_groups(const Manifest& some, const Manifest& others, const std::string& lacks) {
    for (const auto& group : some.groups) {
      const auto found = std::find_if(others.groups.begin(), others.groups.end(),
                                      [&](const auto& g) { return g.name == group.name; });
      const std::string name = "group " + in_quotes(group.name);
      if (found == others.groups.end()) {
        differences_.push_back(name + " " + lacks);
        continue;
      }
      const auto& known = found->hyper_parameters;
      for (const auto& hyper_parameter : group.hyper_parameters) {
        const std::string& name_here = hyper_parameter.first;
        if (same_rule_ &&
            std::none_of(known.begin(), known.end(), [&](const auto& h) { return h.first == name_here; }))
          differences_.push_back(name + ": hyper-parameter " + in_quotes(name_here) + " " + lacks);
      }
    }
  }

  void compare_states() {
    for (const std::string& state : here_.states) {
      if (options_.weights_only && state != "master") continue;
      if (std::find(saved_.states.begin(), saved_.states.end(), state) != saved_.states.end()) {
        // Another rule's moments mean something else, even under the same name, and its count stays behind.
        if (same_rule_ || state == "master") states_.insert(state);
      } else {
        differences_.push_back("state " + in_quotes(state) + " is not in the checkpoint");
      }
    }
    for (const std::string& state : saved_.states) {
      const bool here = std::find(here_.states.begin(), here_.states.end(), state) != here_.states.end();
      if (!options_.weights_only && !here)
        differences_.push_back("state " + in_quotes(state) + " is in the checkpoint only");
    }
  }

  void compare_parameters() {
    for (const auto& parameter : here_.parameters) {
      const auto index = in_saved_.find(parameter.name);
      if (!index) {
        differences_.push_back("parameter " + in_quotes(parameter.name) + " is not in the checkpoint");
        continue;
      }
      compare(saved_.parameters[*index], parameter);
    }
    for (const auto& parameter : saved_.parameters) {
      if (!in_here_.find(parameter.name))
        differences_.push_back("parameter " + in_quotes(parameter.name) + " is in the checkpoint only");
    }
  }

  void compare(const Manifest::Parameter& saved, const Manifest::Parameter& here) {
    const std::string name = "parameter " + in_quotes(here.name);
    if (saved.shape != here.shape) differ(name + ": shape", saved.shape.text(), here.shape.text());
    if (saved.kind() != here.kind()) differ(name, saved.kind(), here.kind());
    if (!options_.weights_only && saved.has_state() && here.has_state() && saved.group != here.group)
      differ(name + ": group", in_quotes(saved.group), in_quotes(here.group));
    if (saved.has_state() && here.has_state() && saved.shape == here.shape) parameters_.insert(here.name);
  }

  void note_what_may_differ() {
    if (saved_.parameter_type != here_.parameter_type) {
      notes_.push_back("parameters were " + saved_.parameter_type + " and are " + here_.parameter_type +
                       " here; both are made from the fp32 masters");
    }
    if (!options_.weights_only && saved_.loss_scale.has_value() != here_.loss_scale.has_value()) {
      notes_.push_back(saved_.loss_scale ? "the checkpoint's loss scale is not used: none is configured"
                                         : "the loss scale starts as configured: the checkpoint has none");
    }
    std::vector<std::string> order;
    for (const auto& parameter : saved_.parameters) {
      if (in_here_.find(parameter.name)) order.push_back(parameter.name);
    }
    std::size_t at = 0;
    for (const auto& parameter : here_.parameters) {
      if (!in_saved_.find(parameter.name)) continue;
      if (parameter.name == order[at++]) continue;
      notes_.push_back("the tables list parameters in another order; states follow the names");
      break;
    }
  }

  const Manifest& saved_;
  const Manifest& here_;
  ParameterIndex in_saved_;
  ParameterIndex in_here_;
  const LoadOptions& options_;
  bool same_rule_ = true;
  std::set<std::string> states_;
  std::set<std::string> parameters_;
  std::vector<std::string> differences_;
  std::vector<std::string> notes_;
};

}  // namespace shardopt::inline v0::checkpoint::detail
