// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/collective.hpp>
#include <shardopt/core/digest.hpp>
#include <shardopt/core/error.hpp>
#include <shardopt/zero/host_wait.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace shardopt::inline v0::detail {

/// Largest message of a handshake; its scratch is one such a rank.
inline constexpr std::int64_t handshake_bytes = 256;

/// One message of every rank, in rank order. Collective; waits. @param scratch  world · handshake_bytes of
/// device memory
template <class Message, Collective Comm>
[[nodiscard]] std::vector<Message> exchange_all(Comm& comm, const Message& mine, void* scratch) {
  static_assert(sizeof(Message) <= static_cast<std::size_t>(handshake_bytes) &&
                std::is_trivially_copyable_v<Message>);
  std::vector<Message> all(static_cast<std::size_t>(comm.world()));
  comm.exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)), scratch);
  return all;
}

/// One text of every rank, of any length, in rank order. Collective; waits.
template <Collective Comm>
[[nodiscard]] std::vector<std::string> exchange_texts(Comm& comm, const std::string& mine, void* scratch) {
  const auto sizes = exchange_all(comm, static_cast<std::uint64_t>(mine.size()), scratch);
  std::vector<std::string> texts(sizes.size());
  for (std::size_t at = 0; at < *std::max_element(sizes.begin(), sizes.end()); at += handshake_bytes) {
    std::array<char, handshake_bytes> piece{};
    if (at < mine.size()) mine.copy(piece.data(), piece.size(), at);
    const auto pieces = exchange_all(comm, piece, scratch);
    for (std::size_t rank = 0; rank < texts.size(); ++rank)
      texts[rank].append(pieces[rank].data(), piece.size());
  }
  for (std::size_t rank = 0; rank < texts.size(); ++rank) texts[rank].resize(sizes[rank]);
  return texts;
}

template <class Message>
[[nodiscard]] bool all_equal(const std::vector<Message>& messages) {
  return std::all_of(messages.begin(), messages.end(),
                     [&](const Message& m) { return m == messages.front(); });
}

/// "rank 0, 2: 'a'; rank 1: 'b'".
[[nodiscard]] inline std::string text_by_ranks(const std::vector<std::string>& texts) {
  std::string result;
  std::vector<std::string> seen;
  for (const std::string& text : texts) {
    if (std::find(seen.begin(), seen.end(), text) != seen.end()) continue;
    seen.push_back(text);
    std::string ranks;
    for (std::size_t rank = 0; rank < texts.size(); ++rank) {
      if (texts[rank] == text) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    }
    result += (result.empty() ? "rank " : "; rank ") + ranks + ": " + detail::in_quotes(text);
  }
  return result;
}

/// The first message of a handshake: a rank's set-up, or why it has none.
struct SetupSummary {
  std::uint64_t lines = 0;
  std::uint64_t digest = 0;
  std::uint64_t failed = 0;
  std::array<char, 200> text = {};  ///< of the failure
  friend bool operator==(const SetupSummary&, const SetupSummary&) = default;
};

/// @throws CollectiveError if a rank has failed
inline void require_none_failed(const std::vector<SetupSummary>& all) {
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].failed == 0) continue;
    throw CollectiveError("shardopt: rank " + std::to_string(rank) +
                          " could not be set up: " + all[rank].text.data());
  }
}

/// Takes this rank's part in the others' handshake, so that they learn of its failure instead of waiting for
/// it. Never throws: what is reported is the failure itself.
template <Collective Comm>
void tell_setup_failure(Comm& comm, std::string_view what) noexcept {
  try {
    SetupSummary summary{.failed = 1};
    std::copy_n(what.begin(), (std::min)(what.size(), summary.text.size() - 1), summary.text.begin());
    void* scratch = comm.device().allocate(comm.world() * handshake_bytes);
    try {
      static_cast<void>(exchange_all(comm, summary, scratch));
    } catch (...) {
      // The others cannot be reached.
    }
    if (!is_stuck(comm)) comm.device().deallocate(scratch);  // what may be used for ever is left
  } catch (...) {
    // Nor without memory for the message.
  }
}

/// Makes a part of the set-up; if that fails, tells the other ranks first.
template <Collective Comm, class Make>
decltype(auto) set_up(Comm& comm, const Make& make) {
  try {
    return make();
  } catch (const std::exception& error) {
    tell_setup_failure(comm, error.what());
    throw;
  } catch (...) {
    tell_setup_failure(comm, "an exception that is no std::exception");
    throw;
  }
}

/// What every rank must have set up alike, as lines; compared by digests, so that agreement costs one small
/// exchange.
class Setup {
 public:
  void add(std::string line) {
    digest_.add(std::string_view(line));
    prefix_.push_back(digest_.value());
    lines_.push_back(std::move(line));
  }

  /// @throws CollectiveError on every rank, naming the first line that differs and the ranks
  template <Collective Comm>
  void require_agreement(Comm& comm, void* scratch) const {
    const auto all =
        exchange_all(comm, SetupSummary{.lines = lines_.size(), .digest = digest_.value()}, scratch);
    require_none_failed(all);
    if (all_equal(all)) return;
    std::uint64_t shortest = all.front().lines;
    for (const SetupSummary& other : all) shortest = (std::min)(shortest, other.lines);
    const std::size_t line = first_difference(comm, static_cast<std::size_t>(shortest), scratch);
    const std::string mine = line < lines_.size() ? lines_[line] : "(nothing)";
    throw CollectiveError("shardopt: ranks are set up differently: " +
                          text_by_ranks(exchange_texts(comm, mine, scratch)));
  }

 private:
  /// Bisects: the first `equal` lines are known to agree, the first `different` ones not to (or all common
  /// ones agree).
  template <Collective Comm>
  [[nodiscard]] std::size_t first_difference(Comm& comm, std::size_t common, void* scratch) const {
    std::size_t equal = 0;
    std::size_t different = common + 1;
    while (different - equal > 1) {
      const std::size_t middle = equal + (different - equal) / 2;
      if (all_equal(exchange_all(comm, prefix_[middle - 1], scratch))) {
        equal = middle;
      } else {
        different = middle;
      }
    }
    return equal;
  }

  std::vector<std::string> lines_;
  std::vector<std::uint64_t> prefix_;
  Digest digest_;
};

}  // namespace shardopt::inline v0::detail
