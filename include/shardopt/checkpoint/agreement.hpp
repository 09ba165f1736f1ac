// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/core/error.hpp>

#include <cstddef>
#include <exception>
#include <set>
#include <stdexcept>
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

/// Collective: checks on every rank what its caller gave, before anything is done. Where that is refused on
/// any, every rank gets the same error.
/// @throws std::invalid_argument or std::logic_error if every refusal is one, else CheckpointError
template <class Optimizer, class Body>
void collectively_check(Optimizer& optimizer, const std::string& what, const Body& body) {
  std::string kind = "other";
  const std::string failure = failure_of([&] {
    try {
      body();
    } catch (const std::invalid_argument&) {
      kind = "argument";
      throw;
    } catch (const std::logic_error&) {
      kind = "logic";
      throw;
    }
  });
  std::vector<std::string> told = optimizer.exchange(failure.empty() ? "" : kind + ":" + failure);
  std::set<std::string> kinds;
  for (std::string& text : told) {
    const std::size_t end = text.find(':');
    if (end == std::string::npos) continue;
    kinds.insert(text.substr(0, end));
    text.erase(0, end + 1);
  }
  if (kinds.empty()) return;
  const std::string text = "shardopt: " + what + ": " + told_failures(told);
  if (kinds.contains("other")) throw CheckpointError(text);
  if (kinds.contains("logic")) throw std::logic_error(text);
  throw std::invalid_argument(text);
}

/// Collective: what rank 0 makes, on every rank. @throws CheckpointError on every rank if that fails
template <class Optimizer, class Make>
[[nodiscard]] std::string from_rank_0(Optimizer& optimizer, const std::string& what, const Make& make) {
  std::string mine;
  if (optimizer.rank() == 0) {
    // Whether it is a failure is said first: what is made may be any text.
    const std::string failure = failure_of([&] { mine = "+" + make(); });
    if (!failure.empty()) mine = "-" + failure;
  }
  const std::string told = optimizer.exchange(mine)[0];
  if (told.starts_with("-")) throw CheckpointError("shardopt: " + what + ": rank 0: " + told.substr(1));
  return told.substr(1);
}

}  // namespace shardopt::inline v0::checkpoint::detail
