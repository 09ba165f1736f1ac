// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <support/plain_rules.hpp>
#include <support/workload.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace test {

/// What an optimizer is told, beside its policies: read by the plain loop and turned into a Config by the
/// test.
template <class Rule>
struct Settings {
  struct GroupRule {
    std::string name;
    Rule rule;
  };
  std::vector<GroupRule> groups;
  float max_norm = std::numeric_limits<float>::infinity();
  float clip_epsilon = 1e-6f;
  bool count_skipped = false;
};

/// A training run by a plain, unsharded loop over the flat index: sums the ranks' gradients by the documented
/// tree, and keeps what each step leaves behind.
///
/// `master` and `states` have the bits that the library promises; `precise` is the same loop in doubles.
template <class Rule, class Precision>
class Reference {
 public:
  using Grad = typename Precision::Grad;
  using Param = typename Precision::Param;
  static constexpr std::size_t state_count = so::state_count<Rule>;

  /// What stands after a step.
  struct Step {
    std::vector<Grad> reduced;
    std::vector<float> master;
    std::vector<std::vector<float>> states;  ///< [state][flat element]
    double norm = 0;
    float clip_factor = 1;
    std::int64_t non_finite = 0;
    std::int64_t iteration = 0;
    std::int64_t updates = 0;
    bool skipped = false;
  };

  Reference(const Workload& work, const Settings<Rule>& settings, int world)
      : work_(work), settings_(settings), places_(work), world_(world) {
    const auto size = static_cast<std::size_t>(places_.elements);
    now_.states.assign(state_count, std::vector<float>(size, 0.0f));
    precise_states_.assign(size * (state_count + 1), 0.0);
    for (const std::int64_t offset : places_.memory_of_flat) {
      now_.master.push_back(static_cast<float>(value_of(initial_parameter<Param>(offset))));
      precise.push_back(static_cast<double>(now_.master.back()));
    }
    for (const Placed& placed : places_.tensors) {
      if (!placed.trainable()) continue;
      std::size_t group = 0;
      while (settings_.groups[group].name != placed.tensor.group) ++group;
      for (std::int64_t i = 0; i < placed.tensor.numel; ++i) group_of_.push_back(group);
    }
    for (std::size_t step = 0; step < work.steps.size(); ++step) take(step);
  }

  std::vector<Step> steps;
  std::vector<double> precise;  ///< parameters after the last step

  [[nodiscard]] const Places& places() const { return places_; }
  [[nodiscard]] int world() const { return world_; }

 private:
  /// Adjacent pairs level by level, an odd last one carried up.
  static float tree_sum(std::vector<float> values) {
    while (values.size() > 1) {
      std::vector<float> next;
      for (std::size_t k = 0; k + 1 < values.size(); k += 2) next.push_back(values[k] + values[k + 1]);
      if (values.size() % 2 != 0) next.push_back(values.back());
      values = next;
    }
    return values.front();
  }

  void reduce(std::size_t step) {
    now_.reduced.clear();
    std::vector<float> values(static_cast<std::size_t>(world_));
    for (std::int64_t flat = 0; flat < places_.elements; ++flat) {
      for (int rank = 0; rank < world_; ++rank) {
        values[static_cast<std::size_t>(rank)] = static_cast<float>(
            value_of(gradient_of<Grad>(work_, step, rank, world_, flat, places_.elements)));
      }
      now_.reduced.push_back(rounded<Grad>(static_cast<double>(tree_sum(values))));
    }
  }

  /// Squares by grain, 32 partial sums each, halved until one is left; grains exactly.
  void measure(double scale) {
    ExactSum sum;
    now_.non_finite = 0;
    const auto add_grain = [&](std::int64_t begin, std::int64_t end) {
      double partial[32] = {};
      for (std::int64_t flat = begin; flat < end; ++flat) {
        const double value = value_of(now_.reduced[static_cast<std::size_t>(flat)]);
        if (std::isfinite(value)) {
          partial[(flat - begin) % 32] += value * value;
        } else {
          ++now_.non_finite;
        }
      }
      for (int apart = 16; apart > 0; apart /= 2) {
        for (int lane = 0; lane < apart; ++lane) partial[lane] += partial[lane + apart];
      }
      sum.add(partial[0]);
    };
    for (const Placed& placed : places_.tensors) {
      if (!placed.trainable()) continue;
      const std::int64_t last = placed.flat + placed.tensor.numel;
      for (std::int64_t begin = placed.flat; begin < last;) {
        const std::int64_t end = std::min((begin / 256 + 1) * 256, last);
        add_grain(begin, end);
        begin = end;
      }
    }
    const bool finite = now_.non_finite == 0;
    now_.norm = finite ? std::sqrt(sum.value()) * std::fabs(scale) : std::numeric_limits<double>::quiet_NaN();
    const double bound = now_.norm + static_cast<double>(settings_.clip_epsilon);
    const double limit = static_cast<double>(settings_.max_norm);
    clip_ = finite && limit < bound ? limit / bound : 1.0;
    now_.clip_factor = static_cast<float>(clip_);
  }

  void take(std::size_t step) {
    const StepPlan& plan = work_.steps[step];
    reduce(step);
    measure(static_cast<double>(plan.gradient_scale));
    now_.iteration += 1;
    now_.skipped = now_.non_finite > 0 || plan.kind == Kind::discarded;
    if (!now_.skipped || settings_.count_skipped) now_.updates += 1;
    if (!now_.skipped) update(plan);
    steps.push_back(now_);
  }

  void update(const StepPlan& plan) {
    const double wide_factor = static_cast<double>(plan.gradient_scale) * clip_;
    const auto factor = static_cast<float>(wide_factor);
    const auto lr_factor = static_cast<double>(plan.lr_factor);
    for (std::size_t flat = 0; flat < now_.master.size(); ++flat) {
      const Rule& rule = settings_.groups[group_of_[flat]].rule;
      float state[state_count + 1] = {};
      for (std::size_t k = 0; k < state_count; ++k) state[k] = now_.states[k][flat];
      const auto grad = static_cast<float>(value_of(now_.reduced[flat]));
      now_.master[flat] =
          PlainRule<Rule>::update(rule, lr_factor, now_.updates, now_.master[flat], grad * factor, state);
      for (std::size_t k = 0; k < state_count; ++k) now_.states[k][flat] = state[k];
      precise[flat] = PlainRule<Rule>::update(rule, lr_factor, now_.updates, precise[flat],
                                              static_cast<double>(grad) * wide_factor,
                                              &precise_states_[flat * (state_count + 1)]);
    }
  }

  Workload work_;
  Settings<Rule> settings_;
  Places places_;
  int world_;
  std::vector<std::size_t> group_of_;
  Step now_;
  double clip_ = 1;  ///< now_.clip_factor before it is rounded
  std::vector<double> precise_states_;
};

}  // namespace test
