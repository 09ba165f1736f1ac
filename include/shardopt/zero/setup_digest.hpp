// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/digest.hpp>
#include <shardopt/core/parameter_table.hpp>
#include <shardopt/core/version.hpp>
#include <shardopt/precision/precision_policy.hpp>
#include <shardopt/zero/config.hpp>
#include <shardopt/zero/handshake.hpp>
#include <shardopt/zero/shard_layout.hpp>

#include <cstdint>
#include <cstdio>
#include <string>
#include <type_traits>
#include <vector>

namespace shardopt::inline v0::detail {

/// A number as text: exact, so that equal text means equal values. Integers are not taken through double,
/// which tells no neighbours apart beyond 2^53.
template <class Number>
[[nodiscard]] std::string exact_text(Number value) {
  if constexpr (std::is_enum_v<Number>) {
    return exact_text(static_cast<std::underlying_type_t<Number>>(value));
  } else if constexpr (std::is_integral_v<Number>) {
    return std::to_string(value);
  } else {
    char text[32];
    std::snprintf(text, sizeof text, "%.17g", static_cast<double>(value));
    return text;
  }
}

/// A number's bits: exact, as exact_text is.
template <class Number>
[[nodiscard]] std::uint64_t exact_bits(Number value) noexcept {
  if constexpr (std::is_enum_v<Number> || std::is_integral_v<Number>) {
    return static_cast<std::uint64_t>(value);
  } else {
    return bits_of(static_cast<double>(value));
  }
}

/// A rule's hyper-parameters as text.
template <class Rule>
[[nodiscard]] std::string text_of_rule(const Rule& rule) {
  std::string text(rule_name<Rule>);
  for_each_field(rule, [&](const auto& field) { text.append(" ").append(exact_text(field)); });
  return text;
}

/// Digest of all groups' hyper-parameters: compared in every step.
template <class Rule>
[[nodiscard]] std::uint64_t digest_of_rules(const std::vector<Group<Rule>>& groups) {
  Digest digest;
  for (const auto& group : groups) {
    for_each_field(group.rule, [&](const auto& field) { digest.add(exact_bits(field)); });
  }
  return digest.value();
}

/// Digest of which rank owns which run of a bucket: two plans may have blocks of the same sizes.
[[nodiscard]] inline std::uint64_t digest_of_owners(const Bucket& bucket) noexcept {
  Digest digest;
  for (const Segment& segment : bucket.segments) {
    digest.add(static_cast<std::uint64_t>(segment.flat.begin));
    digest.add(static_cast<std::uint64_t>(segment.flat.end));
    digest.add(static_cast<std::uint64_t>(segment.owner));
  }
  return digest.value();
}

/// What must be alike on all ranks, one line each.
template <class Rule, class Sharding, class Precision>
[[nodiscard]] Setup describe_setup(const ParameterTable& table, const OptimizerConfig<Rule, Sharding>& config,
                                   Reduction reduction, const ShardLayout& layout) {
  Setup setup;
  const auto name = [](Dtype type) { return std::string(name_of(type)); };
  setup.add("version " + text_of(version));
  setup.add("precision " + name(dtype_of<typename Precision::Param>) + "/" +
            name(dtype_of<typename Precision::Grad>) + "/" + name(dtype_of<typename Precision::Master>));
  setup.add("rule " + std::string(rule_name<Rule>) + " version " + std::to_string(rule_version<Rule>));
  setup.add("sharding " + std::string(Sharding::name) + ", reduction " + std::string(name_of(reduction)));
  setup.add("max_norm " + exact_text(config.max_norm) + ", clip_epsilon " + exact_text(config.clip_epsilon) +
            ", non_finite " + std::to_string(static_cast<int>(config.non_finite)) +
            ", count_skipped_updates " + std::to_string(config.count_skipped_updates) +
            ", initial_parameters " + std::to_string(static_cast<int>(config.initial_parameters)));
  std::string loss_scale = "loss_scale";
  if (config.loss_scale) {
    for_each_field(*config.loss_scale,
                   [&](const auto& field) { loss_scale.append(" ").append(exact_text(field)); });
  }
  setup.add(config.loss_scale ? loss_scale : "loss_scale none");
  for (const auto& group : config.groups)
    setup.add("group " + detail::in_quotes(group.name) + ": " + text_of_rule(group.rule));
  std::size_t index = 0;
  for (const auto& entry : table.entries()) {
    std::string line = "parameter " + std::to_string(index++) + ": " + detail::in_quotes(entry.name) + " " +
                       entry.shape.text() + " group " + detail::in_quotes(entry.group);
    if (!table.separate()) line += " offset " + std::to_string(entry.offset);
    if (entry.frozen) line += " frozen";
    if (entry.alias_of) line += " alias of " + detail::in_quotes(table[*entry.alias_of].name);
    setup.add(std::move(line));
  }
  for (const Bucket& bucket : layout.buckets()) {
    std::string line = "bucket at " + std::to_string(bucket.flat.begin) + ":";
    for (const std::int64_t border : bucket.borders) line.append(" ").append(std::to_string(border));
    line.append(", owners ").append(std::to_string(digest_of_owners(bucket)));
    setup.add(std::move(line));
  }
  return setup;
}

}  // namespace shardopt::inline v0::detail
