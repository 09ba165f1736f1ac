// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/checkpoint/checkpointable.hpp>
#include <shardopt/checkpoint/manifest.hpp>
#include <shardopt/checkpoint/shard_file.hpp>
#include <shardopt/core/dtype.hpp>
#include <shardopt/core/error.hpp>
#include <shardopt/core/math.hpp>
#include <shardopt/core/parameter_table.hpp>
#include <shardopt/core/version.hpp>
#include <shardopt/rules/rule.hpp>

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace shardopt::inline v0::checkpoint::detail {

/// The integer type of an integer's or enumerator's values.
template <class Field>
using NumberOf = typename std::conditional_t<std::is_enum_v<Field>, std::underlying_type<Field>,
                                             std::type_identity<Field>>::type;

/// Hyper-parameters by name. @throws CheckpointError if files cannot hold one
template <OptimizerRule Rule>
[[nodiscard]] std::vector<std::pair<std::string, HyperParameter>> hyper_parameters_of(const Rule& rule) {
  std::vector<std::pair<std::string, HyperParameter>> result;
  for_each_field(rule, [&](const auto& field) {
    using Field = std::remove_cvref_t<decltype(field)>;
    HyperParameter value;
    if constexpr (std::is_same_v<Field, bool>) {
      value = field;
    } else if constexpr (std::is_integral_v<Field> || std::is_enum_v<Field>) {
      const auto number = static_cast<std::int64_t>(field);
      if (std::is_unsigned_v<NumberOf<Field>> && number < 0) {
        throw CheckpointError(
            "shardopt: hyper-parameter " + in_quotes(hyper_parameter_names<Rule>[result.size()]) + " is " +
            std::to_string(static_cast<std::uint64_t>(number)) + ": files hold whole numbers below 2^63");
      }
      value = number;
    } else {
      value = static_cast<double>(field);
    }
    result.emplace_back(hyper_parameter_names<Rule>[result.size()], value);
  });
  return result;
}

/// The opposite of what hyper_parameters_of() does with a field. @return false if the value is of another
/// type, or does not fit
template <class Field>
[[nodiscard]] bool assign(const HyperParameter& value, Field& field) {
  if constexpr (std::is_same_v<Field, bool>) {
    if (const auto* known = std::get_if<bool>(&value)) return field = *known, true;
  } else if constexpr (std::is_integral_v<Field> || std::is_enum_v<Field>) {
    // std::in_range takes neither bool nor char.
    const auto* whole = std::get_if<std::int64_t>(&value);
    if (whole == nullptr || (std::is_unsigned_v<NumberOf<Field>> && *whole < 0)) return false;
    const auto number = static_cast<NumberOf<Field>>(*whole);
    if (static_cast<std::int64_t>(number) == *whole) return field = static_cast<Field>(number), true;
  } else if (!std::holds_alternative<bool>(value)) {
    const double number = std::visit([](auto v) { return static_cast<double>(v); }, value);
    const double most = static_cast<double>((std::numeric_limits<Field>::max)());
    const bool fits = !math::is_finite(number) || (-most <= number && number <= most);
    if (fits) return field = static_cast<Field>(number), true;
  }
  return false;
}

/// The rows of a table.
[[nodiscard]] inline std::vector<Manifest::Parameter> parameters_of(const ParameterTable& table) {
  std::vector<Manifest::Parameter> result;
  for (const auto& entry : table.entries()) {
    result.push_back({.name = entry.name,
                      .shape = entry.shape,
                      .group = entry.group,
                      .frozen = entry.frozen,
                      .alias_of = entry.alias_of ? table[*entry.alias_of].name : std::string()});
  }
  return result;
}

/// All names of states that an optimizer keeps, "master" last.
template <class Optimizer>
[[nodiscard]] std::vector<std::string> states_of(const Optimizer& optimizer) {
  std::vector<std::string> names;
  for (const auto& buffer : optimizer.memory_plan().buffers) {
    if (buffer.name != "master") names.push_back(buffer.name);
  }
  names.emplace_back("master");
  return names;
}

/// The pieces that runs of one state make: neighbours joined, wherever they lie.
template <class Runs>
[[nodiscard]] std::vector<Manifest::Piece> pieces_of(const Runs& runs, const ParameterTable& table,
                                                     std::string_view state) {
  std::vector<Manifest::Piece> pieces;
  for (const auto& run : runs) {
    if (run.state != state) continue;
    append_piece(pieces, static_cast<std::int64_t>(table.id_of(run.parameter).index), run.range);
  }
  return pieces;
}

/// All of a manifest that an optimizer knows: not the generation, not the files. Waits for what `stream`
/// holds.
template <Checkpointable Optimizer>
[[nodiscard]] Manifest describe(const Optimizer& optimizer, typename Optimizer::Stream stream) {
  using Rule = RuleOf<Optimizer>;
  Manifest m;
  m.library_version = shardopt::text_of(version);
  const auto counters = optimizer.counters(stream);
  m.iteration = counters.iteration;
  m.updates = counters.updates;
  if (optimizer.config().loss_scale) {
    m.loss_scale = Manifest::LossScale{counters.loss_scale, counters.loss_scale_good_steps,
                                       counters.loss_scale_hysteresis};
  }
  m.rule = rule_name<Rule>;
  m.rule_version = rule_version<Rule>;
  for (const auto& group : optimizer.config().groups)
    m.groups.push_back({group.name, hyper_parameters_of(group.rule)});
  m.parameter_type = name_of(dtype_of<typename Optimizer::Param>);
  m.gradient_type = name_of(dtype_of<typename Optimizer::Grad>);
  m.sharding = std::remove_cvref_t<decltype(optimizer.config().sharding)>::name;
  m.world = optimizer.world();
  m.parameters = parameters_of(optimizer.table());
  m.states = states_of(optimizer);
  return m;
}

}  // namespace shardopt::inline v0::checkpoint::detail
