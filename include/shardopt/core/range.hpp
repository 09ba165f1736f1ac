// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/config.hpp>

#include <cstdint>

namespace shardopt::inline v0 {

/// Half-open run of elements [begin, end); an empty one owns nothing, wherever it stands.
struct Range {
  /// First element.
  std::int64_t begin = 0;
  /// Behind the last element.
  std::int64_t end = 0;

  /// Number of elements.
  [[nodiscard]] constexpr std::int64_t size() const noexcept { return end > begin ? end - begin : 0; }
  /// Whether it has no element.
  [[nodiscard]] constexpr bool empty() const noexcept { return end <= begin; }
  /// Whether the element lies in it.
  [[nodiscard]] constexpr bool contains(std::int64_t element) const noexcept {
    return begin <= element && element < end;
  }

  /// By both ends: two empty ranges may differ.
  friend constexpr bool operator==(const Range&, const Range&) = default;
};

/// The elements that both have.
[[nodiscard]] constexpr Range intersection(Range a, Range b) noexcept {
  return {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
}

namespace detail {

/// Elements of all runs: of whatever has a `range`.
template <class Runs>
[[nodiscard]] constexpr std::int64_t elements_of(const Runs& runs) noexcept {
  std::int64_t sum = 0;
  for (const auto& run : runs) sum += run.range.size();
  return sum;
}

}  // namespace detail

/// Elements of a full grain: the run that ownership never splits. The flat index is cut at every multiple of
/// it and at every parameter border; since every policy cuts only there, sums inside a grain do not depend on
/// the policy.
inline constexpr std::int64_t grain_elements = 256;

/// Rounds up to a multiple. @pre value >= 0, multiple > 0, and the result fits.
[[nodiscard]] constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) noexcept {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace shardopt::inline v0
