// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/manifest.hpp>
#include <shardopt/checkpoint/parameter_index.hpp>
#include <shardopt/core/error.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace shardopt::inline v0::checkpoint::detail {

using namespace shardopt::detail;

/// Where two manifests say different things, for people to read.
class ManifestDifferences {
 public:
  ManifestDifferences(const Manifest& a, const Manifest& b) : a_(a), b_(b) {
    compare_counters();
    compare_rule();
    compare_parameters();
    compare_states();
    compare_extras();
    compare_storage();
  }

  /// What training sees.
  [[nodiscard]] std::vector<std::string> meaning() && { return std::move(meaning_); }
  /// How the same content is stored.
  [[nodiscard]] std::vector<std::string> storage() && { return std::move(storage_); }

 private:
  using Texts = std::vector<std::string>;

  template <class Value>
  [[nodiscard]] static std::string shown(const Value& value) {
    if constexpr (std::is_same_v<Value, std::string>) {
      return in_quotes(value);
    } else if constexpr (std::is_integral_v<Value>) {
      return std::to_string(value);
    } else {
      return text_of_number(static_cast<double>(value));
    }
  }

  template <class Value>
  static void compare(Texts& texts, const std::string& what, const Value& a, const Value& b) {
    if (!(a == b)) texts.push_back(what + ": " + shown(a) + " in A, " + shown(b) + " in B");
  }

  /// Things that have names: `different(a, b)` is called with those that both have.
  template <class Things, class Name, class Different>
  void match(const std::string& what, const Things& a, const Things& b, const Name& name,
             const Different& different) {
    for (const auto& x : a) {
      bool found = false;
      for (const auto& y : b) {
        if (name(x) != name(y)) continue;
        found = true;
        different(x, y);
      }
      if (!found) meaning_.push_back(what + " " + in_quotes(name(x)) + " is in A only");
    }
    for (const auto& y : b) {
      bool found = false;
      for (const auto& x : a) found = found || name(x) == name(y);
      if (!found) meaning_.push_back(what + " " + in_quotes(name(y)) + " is in B only");
    }
  }

  void compare_counters() {
    compare(meaning_, "iteration", a_.iteration, b_.iteration);
    compare(meaning_, "updates", a_.updates, b_.updates);
    if (a_.loss_scale.has_value() != b_.loss_scale.has_value()) {
      meaning_.push_back(std::string("a loss scale is in ") + (a_.loss_scale ? "A" : "B") + " only");
    } else if (a_.loss_scale) {
      if (!same_value(a_.loss_scale->value, b_.loss_scale->value))
        compare(meaning_, "loss scale", a_.loss_scale->value, b_.loss_scale->value);
      compare(meaning_, "loss scale, good steps", a_.loss_scale->good_steps, b_.loss_scale->good_steps);
      compare(meaning_, "loss scale, hysteresis", a_.loss_scale->hysteresis, b_.loss_scale->hysteresis);
    }
  }

  void compare_rule() {
    compare(meaning_, "rule", a_.rule, b_.rule);
    compare(meaning_, "rule version", a_.rule_version, b_.rule_version);
    compare(meaning_, "type of parameters", a_.parameter_type, b_.parameter_type);
    compare(meaning_, "type of gradients", a_.gradient_type, b_.gradient_type);
    match(
        "group", a_.groups, b_.groups, [](const auto& g) { return g.name; },
        [&](const auto& a, const auto& b) {
          const std::string group = "group " + in_quotes(a.name) + ": ";
          match(
              group + "hyper-parameter", a.hyper_parameters, b.hyper_parameters,
              [](const auto& h) { return h.first; },
              [&](const auto& x, const auto& y) {
                if (!same_value(x.second, y.second))
                  meaning_.push_back(group + x.first + ": " + text_of(x.second) + " in A, " +
                                     text_of(y.second) + " in B");
              });
        });
  }

  void compare_parameters() {
    const ParameterIndex in_a(a_);
    const ParameterIndex in_b(b_);
    bool order = a_.parameters.size() == b_.parameters.size();
    for (std::size_t k = 0; k < a_.parameters.size(); ++k) {
      const auto& a = a_.parameters[k];
      const auto found = in_b.find(a.name);
      if (!found) {
        meaning_.push_back("parameter " + in_quotes(a.name) + " is in A only");
        continue;
      }
      order = order && *found == k;
      compare_parameter(a, b_.parameters[*found]);
    }
    bool all = true;
    for (const auto& b : b_.parameters) {
      if (in_a.find(b.name)) continue;
      meaning_.push_back("parameter " + in_quotes(b.name) + " is in B only");
      all = false;
    }
    if (all && !order && a_.parameters.size() == b_.parameters.size())
      meaning_.emplace_back("the tables list the parameters in another order");
  }

  void compare_parameter(const Manifest::Parameter& a, const Manifest::Parameter& b) {
    const std::string what = "parameter " + in_quotes(a.name) + ": ";
    if (a.shape != b.shape)
      meaning_.push_back(what + "shape " + a.shape.text() + " in A, " + b.shape.text() + " in B");
    if (a.kind() != b.kind()) meaning_.push_back(what + a.kind() + " in A, " + b.kind() + " in B");
    if (a.has_state() && b.has_state()) compare(meaning_, what + "group", a.group, b.group);
  }

  void compare_states() {
    match(
        "state", a_.states, b_.states, [](const auto& s) { return s; }, [](const auto&, const auto&) {});
  }

  void compare_extras() {
    match(
        "extra text", a_.extras, b_.extras, [](const auto& e) { return e.first; },
        [&](const auto& a, const auto& b) {
          if (a.second != b.second)
            meaning_.push_back("extra text " + in_quotes(a.first) + " is another one in B");
        });
  }

  void compare_storage() {
    compare(storage_, "world", a_.world, b_.world);
    compare(storage_, "sharding", a_.sharding, b_.sharding);
    compare(storage_, "library version", a_.library_version, b_.library_version);
    if (a_.coordinates != b_.coordinates) storage_.emplace_back("coordinates are others in B");
    for (std::size_t rank = 0; a_.world == b_.world && rank < a_.files.size() && rank < b_.files.size();
         ++rank) {
      if (a_.files[rank].extra != b_.files[rank].extra)
        storage_.push_back("the text of rank " + std::to_string(rank) + " is another one in B");
    }
  }

  const Manifest& a_;
  const Manifest& b_;
  Texts meaning_;
  Texts storage_;
};

}  // namespace shardopt::inline v0::checkpoint::detail
