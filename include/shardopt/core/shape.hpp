// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/config.hpp>

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <ranges>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace shardopt::inline v0 {

/// A non-negative 64-bit count that takes any integer type of the engine's without a narrowing error, and
/// refuses a negative or too large value with std::invalid_argument.
class Count {
 public:
  constexpr Count() noexcept = default;

  /// @throws std::invalid_argument if the value is negative or does not fit
  template <std::integral Integer>
  constexpr Count(Integer value) : value_(checked(value)) {}  // NOLINT: implicit, `.offset = t.offset`

  /// The count.
  [[nodiscard]] constexpr std::int64_t value() const noexcept { return value_; }

 private:
  template <std::integral Integer>
  static constexpr std::int64_t checked(Integer value) {
    if (!std::in_range<std::int64_t>(value) || std::cmp_less(value, 0)) {
      throw std::invalid_argument("shardopt: a count of elements must lie in 0 .. 2^63-1, got " +
                                  std::to_string(value));
    }
    return static_cast<std::int64_t>(value);
  }

  std::int64_t value_ = 0;
};

/// The dimensions of a parameter. No dimension: a scalar, one element. A zero dimension: no element.
class Shape {
 public:
  Shape() = default;
  /// From a list of dimensions. @throws std::invalid_argument for a negative one
  Shape(std::initializer_list<Count> dimensions) { assign(dimensions); }

  /// From any range of integers: the engine's own vector or array.
  template <std::ranges::input_range Dimensions>
  requires std::integral<std::ranges::range_value_t<Dimensions>> Shape(
      const Dimensions& dimensions) {  // NOLINT: implicit, `.shape = t.shape`
    assign(dimensions);
  }

  /// Outermost first.
  [[nodiscard]] const std::vector<std::int64_t>& dimensions() const noexcept { return dimensions_; }

  /// Number of elements. @throws std::invalid_argument if the product exceeds 2^63-1
  [[nodiscard]] std::int64_t numel() const {
    constexpr std::int64_t limit = (std::numeric_limits<std::int64_t>::max)();
    std::int64_t product = 1;
    for (std::int64_t d : dimensions_) {
      if (d == 0) return 0;
    }
    for (std::int64_t d : dimensions_) {
      if (product > limit / d) {
        throw std::invalid_argument("shardopt: the elements of shape " + text() + " do not fit in 64 bits");
      }
      product *= d;
    }
    return product;
  }

  /// As in messages: "[64, 128]".
  [[nodiscard]] std::string text() const {
    std::string result = "[";
    for (std::int64_t d : dimensions_) {
      if (result.size() > 1) result += ", ";
      result += std::to_string(d);
    }
    return result + "]";
  }

  /// By dimensions.
  friend bool operator==(const Shape&, const Shape&) = default;

 private:
  template <class Dimensions>
  void assign(const Dimensions& dimensions) {
    for (const auto& d : dimensions) dimensions_.push_back(Count(d).value());
  }

  std::vector<std::int64_t> dimensions_;
};

}  // namespace shardopt::inline v0
