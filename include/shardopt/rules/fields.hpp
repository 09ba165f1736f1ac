// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/config.hpp>

#include <cstddef>
#include <type_traits>
#include <utility>

namespace shardopt::inline v0 {

namespace detail {

/// Stands for any field in a braced list. Never called.
struct AnyField {
  template <class Field>
  operator Field() const noexcept;  // NOLINT(google-explicit-constructor)
};

template <std::size_t>
using AnyFieldAt = AnyField;

template <class Aggregate, class Indices>
inline constexpr bool takes_fields = false;

template <class Aggregate, std::size_t... index>
inline constexpr bool takes_fields<Aggregate, std::index_sequence<index...>> = requires {
  Aggregate{AnyFieldAt<index>{}...};
};

template <class Aggregate, std::size_t count>
[[nodiscard]] consteval std::size_t count_fields() noexcept {
  if constexpr (count == 0 || takes_fields<Aggregate, std::make_index_sequence<count>>) {
    return count;
  } else {
    return count_fields<Aggregate, count - 1>();
  }
}

/// The most fields that structured bindings are spelled out for here.
inline constexpr std::size_t most_fields = 12;

/// Picks one of its arguments.
template <std::size_t index, class First, class... Rest>
[[nodiscard]] SHARDOPT_HD_INLINE constexpr auto& pick(First& first, Rest&... rest) noexcept {
  if constexpr (index == 0) {
    return first;
  } else {
    return pick<index - 1>(rest...);
  }
}

}  // namespace detail

/// How many fields an aggregate has: 0 to 12, none of them an array or a base class.
template <class Aggregate>
inline constexpr std::size_t field_count = [] {
  static_assert(std::is_aggregate_v<Aggregate>, "only the fields of an aggregate can be listed");
  static_assert(!detail::takes_fields<Aggregate, std::make_index_sequence<detail::most_fields + 1>>,
                "at most 12 fields can be listed");
  return detail::count_fields<Aggregate, detail::most_fields>();
}();

/// The field at a place, by reference, counted from 0 in the order of declaration.
template <std::size_t index, class Aggregate>
requires(index < field_count<std::remove_const_t<Aggregate>>) [[nodiscard]] SHARDOPT_HD_INLINE
    constexpr auto& field(Aggregate& aggregate) noexcept {
  constexpr std::size_t count = field_count<std::remove_const_t<Aggregate>>;
  if constexpr (count == 1) {
    auto& [a] = aggregate;
    return detail::pick<index>(a);  // not `a`: nvcc takes the binding for a local variable
  } else if constexpr (count == 2) {
    auto& [a, b] = aggregate;
    return detail::pick<index>(a, b);
  } else if constexpr (count == 3) {
    auto& [a, b, c] = aggregate;
    return detail::pick<index>(a, b, c);
  } else if constexpr (count == 4) {
    auto& [a, b, c, d] = aggregate;
    return detail::pick<index>(a, b, c, d);
  } else if constexpr (count == 5) {
    auto& [a, b, c, d, e] = aggregate;
    return detail::pick<index>(a, b, c, d, e);
  } else if constexpr (count == 6) {
    auto& [a, b, c, d, e, f] = aggregate;
    return detail::pick<index>(a, b, c, d, e, f);
  } else if constexpr (count == 7) {
    auto& [a, b, c, d, e, f, g] = aggregate;
    return detail::pick<index>(a, b, c, d, e, f, g);
  } else if constexpr (count == 8) {
    auto& [a, b, c, d, e, f, g, h] = aggregate;
    return detail::pick<index>(a, b, c, d, e, f, g, h);
  } else if constexpr (count == 9) {
    auto& [a, b, c, d, e, f, g, h, i] = aggregate;
    return detail::pick<index>(a, b, c, d, e, f, g, h, i);
  } else if constexpr (count == 10) {
    auto& [a, b, c, d, e, f, g, h, i, j] = aggregate;
    return detail::pick<index>(a, b, c, d, e, f, g, h, i, j);
  } else if constexpr (count == 11) {
    auto& [a, b, c, d, e, f, g, h, i, j, k] = aggregate;
    return detail::pick<index>(a, b, c, d, e, f, g, h, i, j, k);
  } else if constexpr (count == 12) {
    auto& [a, b, c, d, e, f, g, h, i, j, k, l] = aggregate;
    return detail::pick<index>(a, b, c, d, e, f, g, h, i, j, k, l);
  }
}

/// Calls a function with each field of an aggregate in turn, by reference.
///
/// Used for digests of hyper-parameters: `for_each_field(rule, [&](auto value) { … })`.
template <class Aggregate, class Function>
constexpr void for_each_field(Aggregate&& aggregate, Function&& function) {
  [&]<std::size_t... index>(std::index_sequence<index...>) {
    (static_cast<void>(function(field<index>(aggregate))), ...);
  }
  (std::make_index_sequence<field_count<std::remove_cvref_t<Aggregate>>>{});
}

}  // namespace shardopt::inline v0
