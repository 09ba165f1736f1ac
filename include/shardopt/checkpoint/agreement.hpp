// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/core/error.hpp>

#include <cstddef>
#include <exception>
#include <string>
#include <utility>
#include <vector>

namespace shardopt::inline v0::checkpoint::detail {

using namespace shardopt::detail;

/// Runs a part of the work, and gives the text of its failure, or nothing. A failure that is no exception of
/// the standard's kind is one, too.
template <class Body>
[[nodiscard]] std::string failure_of(const Body& body) {
  try {
    body();
    return {};
  } catch (const std::exception& error) {
    return *error.what() != '\0' ? error.what() : "an exception without a text";
  } catch (...) {
    return "an unknown exception";
  }
}

/// What failed on which ranks, or nothing; "rank 2: …". Equal texts are told once.
[[nodiscard]] inline std::string told_failures(const std::vector<std::string>& failures) {
  std::string text;
  for (std::size_t rank = 0; rank < failures.size(); ++rank) {
    if (failures[rank].empty()) continue;
    std::string ranks;
    bool told = false;
    for (std::size_t other = 0; other < failures.size(); ++other) {
      if (failures[other] != failures[rank]) continue;
      told = told || other < rank;
      ranks += (ranks.empty() ? "" : ", ") + std::to_string(other);
    }
    if (!told) text += (text.empty() ? "rank " : "; rank ") + ranks + ": " + failures[rank];
  }
  return text;
}

/// Collective: runs a part of the work on every rank; where it fails on any, every rank gets the same error.
/// @param what  that was to be done, for the message  @throws CheckpointError
template <class Optimizer, class Body>
void collectively(Optimizer& optimizer, const std::string& what, const Body& body) {
  const std::string failures = told_failures(optimizer.exchange(failure_of(body)));
  if (!failures.empty()) throw CheckpointError("shardopt: " + what + ": " + failures);
}

}  // namespace shardopt::inline v0::checkpoint::detail
