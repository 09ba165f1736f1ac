// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/config.hpp>

#include <cstddef>
#include <string_view>

namespace shardopt::inline v0::checkpoint {

namespace detail {

[[nodiscard]] constexpr bool is_digit(char letter) noexcept { return letter >= '0' && letter <= '9'; }

/// Takes a run of digits, without leading zeros, from the front of a text.
[[nodiscard]] constexpr std::string_view take_digits(std::string_view& text) noexcept {
  std::size_t end = 0;
  while (end < text.size() && is_digit(text[end])) ++end;
  std::size_t begin = 0;
  while (begin < end && text[begin] == '0') ++begin;
  const std::string_view digits = text.substr(begin, end - begin);
  text.remove_prefix(end);
  return digits;
}

}  // namespace detail

/// Whether one name comes before another where runs of digits count as numbers of any length: "layer.2"
/// before "layer.10". A strict total order: names that differ in leading zeros only follow their text.
[[nodiscard]] constexpr bool numeric_less(std::string_view a, std::string_view b) noexcept {
  const std::string_view text_a = a;
  const std::string_view text_b = b;
  while (!a.empty() && !b.empty()) {
    if (detail::is_digit(a.front()) && detail::is_digit(b.front())) {
      const std::string_view number_a = detail::take_digits(a);
      const std::string_view number_b = detail::take_digits(b);
      if (number_a.size() != number_b.size()) return number_a.size() < number_b.size();
      if (number_a != number_b) return number_a < number_b;
    } else {
      if (a.front() != b.front())
        return static_cast<unsigned char>(a.front()) < static_cast<unsigned char>(b.front());
      a.remove_prefix(1);
      b.remove_prefix(1);
    }
  }
  if (a.empty() != b.empty()) return a.empty();
  return text_a < text_b;
}

}  // namespace shardopt::inline v0::checkpoint
