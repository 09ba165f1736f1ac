// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/config.hpp>
#include <shardopt/core/math.hpp>
#include <shardopt/rules/fields.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string_view>
#include <type_traits>
#include <utility>

namespace shardopt::inline v0 {

/// What changes from step to step, as a rule sees it.
struct StepScalars {
  float lr_factor = 1.0f;  ///< the schedule's factor; a rule multiplies its learning rate with it
  std::uint64_t update =
      1;  ///< number of the update that is being made: 1 for the first; skipped steps not counted
};

namespace detail {

template <class Fields, class Value, std::size_t... index>
[[nodiscard]] consteval bool all_fields_are(std::index_sequence<index...>) noexcept {
  return (std::is_same_v<std::remove_cvref_t<decltype(field<index>(std::declval<Fields&>()))>, Value> &&
          ...) &&
         sizeof(Fields) == sizeof...(index) * sizeof(Value);
}

/// Whether `Fields` has members of type `Value` and nothing else.
template <class Fields, class Value>
[[nodiscard]] consteval bool consists_of() noexcept {
  if constexpr (!PlainFields<Fields> || !std::is_trivially_copyable_v<Fields>) {
    return false;
  } else if constexpr (std::is_empty_v<Fields>) {
    return true;
  } else {
    return all_fields_are<Fields, Value>(std::make_index_sequence<field_count<Fields>>{});
  }
}

/// Whether a rule's names, where it has any, match its state: one a member, none empty, none twice, and none
/// "master", which is the library's own.
template <class Rule>
[[nodiscard]] consteval bool names_match() noexcept {
  if constexpr (requires { Rule::state_names; }) {
    if (std::size(Rule::state_names) != field_count<typename Rule::template State<float>>) return false;
    for (std::size_t k = 0; k != std::size(Rule::state_names); ++k) {
      const std::string_view name = Rule::state_names[k];
      if (name.empty() || name == "master") return false;
      for (std::size_t other = 0; other != k; ++other) {
        if (name == Rule::state_names[other]) return false;
      }
    }
  }
  return true;
}

/// Whether a rule's update exists for one value type.
template <class Rule, class Value>
concept UpdatesBy = consists_of<typename Rule::template State<Value>, Value>() &&
    requires(typename Rule::Constants constants, Value value, typename Rule::template State<Value>& state) {
  { Rule::template update<Value>(constants, value, value, state) } -> std::same_as<Value>;
};

#if SHARDOPT_HOST_AVX2
template <class Rule>
concept UpdatesOnHost = UpdatesBy<Rule, float> && UpdatesBy<Rule, Pack>;
#else
template <class Rule>
concept UpdatesOnHost = UpdatesBy<Rule, float>;
#endif

/// Whether a rule makes its constants.
template <class Rule>
concept MakesConstants = requires(const Rule rule, StepScalars scalars) {
  { rule.constants(scalars) } -> std::same_as<typename Rule::Constants>;
};

}  // namespace detail

/// What one element's update is.
///
/// A rule is a trivially copyable aggregate of hyper-parameters (at most 12 numbers) with
/// - `template <class V> struct State`: the state of one element (of eight where V is Pack), 0 to 12 members
///   of type `V`, zero before the first update;
/// - `struct Constants`: what all elements of a step have in common, trivially copyable;
/// - `SHARDOPT_HD Constants constants(StepScalars) const`;
/// - `template <class V> SHARDOPT_RULE static V update(Constants, V param, V grad, State<V>&)`: the
///   new parameter. It may use the operations of shardopt::math only, so that `float` on the device and Pack
///   on the host give the same bits.
///
/// Optional:
/// - `static constexpr std::string_view name`;
/// - `static constexpr std::array<std::string_view, n> state_names`: the names of State's
///   members in checkpoints and state buffers, distinct, not empty, and not "master", the name of the fp32
///   copy of 16-bit parameters;
/// - `static constexpr std::array<std::string_view, n> hyper_parameter_names`: the names of the rule's own
///   members in checkpoints;
/// - `static constexpr int version`, counted up when the meaning of State changes: checkpoints of another
///   version are refused;
/// - `void validate() const`, which throws std::invalid_argument for a hyper-parameter out of range;
/// - `bool stateless() const`, true where these hyper-parameters need no state: then none is kept, and update
///   is handed zeros.
template <class Rule>
concept OptimizerRule = detail::PlainFields<Rule> && std::is_trivially_copyable_v<Rule> &&
    std::is_trivially_copyable_v<typename Rule::Constants> && detail::MakesConstants<Rule> &&
    detail::UpdatesOnHost<Rule> && detail::names_match<Rule>();

/// How many numbers of state a rule keeps for each element.
template <OptimizerRule Rule>
inline constexpr std::size_t state_count = field_count<typename Rule::template State<float>>;

/// A rule's name: its own, or "custom".
template <OptimizerRule Rule>
inline constexpr std::string_view rule_name = [] {
  if constexpr (requires { Rule::name; }) {
    return std::string_view(Rule::name);
  } else {
    return std::string_view("custom");
  }
}();

/// The names of a rule's state buffers: its own, or "state_0", "state_1", …
template <OptimizerRule Rule>
inline constexpr std::array<std::string_view, state_count<Rule>> state_names = [] {
  std::array<std::string_view, state_count<Rule>> names{};
  if constexpr (requires { Rule::state_names; }) {
    for (std::size_t k = 0; k != names.size(); ++k) names[k] = Rule::state_names[k];
  } else {
    constexpr std::array<std::string_view, detail::most_fields> numbered{
        "state_0", "state_1", "state_2", "state_3", "state_4",  "state_5",
        "state_6", "state_7", "state_8", "state_9", "state_10", "state_11"};
    for (std::size_t k = 0; k != names.size(); ++k) names[k] = numbered[k];
  }
  return names;
}();

/// The names of a rule's hyper-parameters: its own, or "hyper_parameter_0", …
template <OptimizerRule Rule>
inline constexpr std::array<std::string_view, field_count<Rule>> hyper_parameter_names = [] {
  std::array<std::string_view, field_count<Rule>> names{};
  if constexpr (requires { Rule::hyper_parameter_names; }) {
    static_assert(std::size(Rule::hyper_parameter_names) == field_count<Rule>,
                  "shardopt: hyper_parameter_names must name each member of the rule");
    for (std::size_t k = 0; k != names.size(); ++k) names[k] = Rule::hyper_parameter_names[k];
  } else {
    constexpr std::array<std::string_view, detail::most_fields> numbered{
        "hyper_parameter_0", "hyper_parameter_1", "hyper_parameter_2",  "hyper_parameter_3",
        "hyper_parameter_4", "hyper_parameter_5", "hyper_parameter_6",  "hyper_parameter_7",
        "hyper_parameter_8", "hyper_parameter_9", "hyper_parameter_10", "hyper_parameter_11"};
    for (std::size_t k = 0; k != names.size(); ++k) names[k] = numbered[k];
  }
  return names;
}();

/// A rule's version: its own, or 1.
template <OptimizerRule Rule>
inline constexpr int rule_version = [] {
  if constexpr (requires { Rule::version; }) {
    return static_cast<int>(Rule::version);
  } else {
    return 1;
  }
}();

/// Checks the hyper-parameters, if the rule says how.
/// @throws std::invalid_argument  naming the hyper-parameter and what is legal
template <OptimizerRule Rule>
void validate(const Rule& rule) {
  if constexpr (requires { rule.validate(); }) rule.validate();
}

/// Whether some hyper-parameters of a rule that has state need none.
template <OptimizerRule Rule>
inline constexpr bool may_be_stateless = state_count<Rule> > 0 && requires(const Rule rule) {
  rule.stateless();
};

/// Whether these hyper-parameters need no state, so that none is kept.
template <OptimizerRule Rule>
[[nodiscard]] bool stateless(const Rule& rule) {
  if constexpr (state_count<Rule> == 0) {
    return true;
  } else if constexpr (requires { rule.stateless(); }) {
    return rule.stateless();
  } else {
    return false;
  }
}

}  // namespace shardopt::inline v0
