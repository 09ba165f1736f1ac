// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/config.hpp>

#include <cstdint>
#include <string_view>

namespace shardopt::inline v0 {

/// Mixes the bits of a 64-bit word (the finalizer of SplitMix64: Steele, Lea, Flood 2014).
[[nodiscard]] SHARDOPT_HD constexpr std::uint64_t mix_bits(std::uint64_t word) noexcept {
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9U;
  word = (word ^ (word >> 27)) * 0x94d049bb133111ebU;
  return word ^ (word >> 31);
}

/// A 64-bit digest of a sequence of words and texts: finds differences, resists no attack.
class Digest {
 public:
  /// Appends a word.
  constexpr void add(std::uint64_t word) noexcept {
    state_ = mix_bits(state_ + 0x9e3779b97f4a7c15U) ^ mix_bits(word);
  }

  /// Appends a text and its length.
  constexpr void add(std::string_view text) noexcept {
    for (const char c : text) add(static_cast<std::uint64_t>(static_cast<unsigned char>(c)));
    add(static_cast<std::uint64_t>(text.size()));
  }

  /// Of all that was added so far.
  [[nodiscard]] constexpr std::uint64_t value() const noexcept { return mix_bits(state_); }

 private:
  std::uint64_t state_ = 0;
};

namespace detail {

/// Digest of one element of a buffer; a buffer's is the sum of its elements', in any order.
template <class Bits>
[[nodiscard]] SHARDOPT_HD constexpr std::uint64_t element_digest(std::uint64_t index, Bits bits) noexcept {
  return mix_bits(mix_bits(index + 0x9e3779b97f4a7c15U) ^ static_cast<std::uint64_t>(bits));
}

}  // namespace detail
}  // namespace shardopt::inline v0
