// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/checkpoint/checksum.hpp>
#include <shardopt/core/error.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace shardopt::inline v0::checkpoint::detail {

using namespace shardopt::detail;

/// Something that ranks must agree on: what it is, and what this rank has.
using Fact = std::pair<std::string, std::string>;

/// One checksum of all facts.
[[nodiscard]] inline std::string checksum_of(const std::vector<Fact>& facts) {
  const auto of = [](std::string_view text) { return checksum(std::as_bytes(std::span(text))); };
  std::string all;
  for (const auto& [name, value] : facts) all += hexadecimal(of(name)) + hexadecimal(of(value));
  return hexadecimal(of(all));
}

/// A line a fact, as people read it: a long value by its size alone.
[[nodiscard]] inline std::string lines_of(const std::vector<Fact>& facts) {
  constexpr std::size_t longest = 64;
  std::string lines;
  for (const auto& [name, value] : facts) {
    lines += name + " ";
    lines += value.size() <= longest ? in_quotes(value)
                                     : "of " + std::to_string(value.size()) + " bytes with checksum " +
                                           checksum_of({{name, value}});
    lines += "\n";
  }
  return lines;
}

/// The first line that two texts do not have in common: from each.
[[nodiscard]] inline std::pair<std::string, std::string> first_difference(std::string_view a,
                                                                          std::string_view b) {
  const auto take = [](std::string_view& text) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix((std::min)(text.size(), line.size() + 1));
    return line;
  };
  while (!a.empty() || !b.empty()) {
    const std::string_view from_a = take(a);
    const std::string_view from_b = take(b);
    if (from_a != from_b) return {std::string(from_a), std::string(from_b)};
  }
  return {};
}

/// Collective: compares facts over the ranks. What is sent does not grow with them, unless they differ.
/// @throws CheckpointError on every rank, naming the first fact that is not the same on all
template <class Optimizer>
void require_equal_on_ranks(Optimizer& optimizer, const std::string& what, const std::vector<Fact>& mine) {
  const std::vector<std::string> checksums = optimizer.exchange(checksum_of(mine));
  const auto other = std::find_if(checksums.begin(), checksums.end(),
                                  [&](const std::string& text) { return text != checksums.front(); });
  if (other == checksums.end()) return;
  const auto rank = static_cast<std::size_t>(other - checksums.begin());
  const std::vector<std::string> lines = optimizer.exchange(lines_of(mine));
  const auto [first, second] = first_difference(lines.front(), lines[rank]);
  const auto shown = [](const std::string& line) { return line.empty() ? "nothing more" : line; };
  throw CheckpointError("shardopt: " + what + ": ranks disagree: rank 0 has " + shown(first) + ", rank " +
                        std::to_string(rank) + " has " + shown(second));
}

}  // namespace shardopt::inline v0::checkpoint::detail
