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

/// The most fields that structured bindings are spelled out for here.
inline constexpr std::size_t most_fields = 12;

template <class Aggregate, class Indices>
inline constexpr bool takes_fields = false;

template <class Aggregate, std::size_t... index>
inline constexpr bool takes_fields<Aggregate, std::index_sequence<index...>> = requires {
  Aggregate{AnyFieldAt<index>{}...};
};

/// Whether the field behind the given ones takes two values in braces: then it is an array or an aggregate.
template <class Aggregate, class Indices>
inline constexpr bool takes_pair = false;

template <class Aggregate, std::size_t... index>
inline constexpr bool takes_pair<Aggregate, std::index_sequence<index...>> = requires {
  Aggregate{AnyFieldAt<index>{}..., {AnyField{}, AnyField{}}};
};

template <class Aggregate, std::size_t count>
[[nodiscard]] consteval std::size_t count_fields() noexcept {
  if constexpr (count == 0 || takes_fields<Aggregate, std::make_index_sequence<count>>) {
    return count;
  } else {
    return count_fields<Aggregate, count - 1>();
  }
}

template <class Aggregate, std::size_t... index>
[[nodiscard]] consteval bool takes_pair_anywhere(std::index_sequence<index...>) noexcept {
  return (takes_pair<Aggregate, std::make_index_sequence<index>> || ...);
}

template <class Aggregate>
[[nodiscard]] consteval bool has_plain_fields() noexcept {
  if constexpr (!std::is_aggregate_v<Aggregate>) {
    return false;
  } else if constexpr (takes_fields<Aggregate, std::make_index_sequence<most_fields + 1>>) {
    return false;
  } else {
    return !takes_pair_anywhere<Aggregate>(
        std::make_index_sequence<count_fields<Aggregate, most_fields>()>{});
  }
}

/// An aggregate of at most 12 fields, none of them an array or an aggregate of several fields.
template <class Aggregate>
concept PlainFields = has_plain_fields<Aggregate>();

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

/// How many fields an aggregate has: 0 to 12, none of them an array, an aggregate or a base class.
template <detail::PlainFields Aggregate>
inline constexpr std::size_t field_count = detail::count_fields<Aggregate, detail::most_fields>();

/// The field at a place, by reference, counted from 0 in the order of declaration.
template <std::size_t index, class Aggregate>
[[nodiscard]] SHARDOPT_HD_INLINE constexpr auto& field(Aggregate& aggregate) noexcept {
  constexpr std::size_t count = field_count<std::remove_const_t<Aggregate>>;
  static_assert(index < count, "the aggregate has fewer fields");
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

namespace detail {

template <class Aggregate, class Function, std::size_t... index>
constexpr void call_with_fields(Aggregate& aggregate, Function& function, std::index_sequence<index...>) {
  (static_cast<void>(function(field<index>(aggregate))), ...);
}

}  // namespace detail

/// Calls a function with each field of an aggregate in turn, by reference.
///
/// Used for digests of hyper-parameters: `for_each_field(rule, [&](auto value) { … })`.
template <class Aggregate, class Function>
constexpr void for_each_field(Aggregate&& aggregate, Function&& function) {
  detail::call_with_fields(aggregate, function,
                           std::make_index_sequence<field_count<std::remove_cvref_t<Aggregate>>>{});
}

}  // namespace shardopt::inline v0
