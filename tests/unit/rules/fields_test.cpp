// SPDX-License-Identifier: Apache-2.0
#include <shardopt/rules/fields.hpp>
//
#include <shardopt/rules/adamw.hpp>

#include <catch2/catch_test_macros.hpp>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace so = shardopt;

namespace {

enum class Color : std::uint8_t { red, green };

struct Nothing {};
struct Mixed {
  bool flag;
  double number;
  std::int64_t count;
  Color color;
};
struct Twelve {
  int a = 1, b = 2, c = 3, d = 4, e = 5, f = 6, g = 7, h = 8, i = 9, j = 10, k = 11, l = 12;
};
struct Thirteen {
  int a, b, c, d, e, f, g, h, i, j, k, l, m;
};
struct WithArray {
  int a;
  float b[3];
};
struct WithAggregate {
  int a;
  Mixed b;
};

}  // namespace

TEST_CASE("The fields of an aggregate are counted", "[rules][host]") {
  STATIC_REQUIRE(so::field_count<Nothing> == 0);
  STATIC_REQUIRE(so::field_count<Mixed> == 4);
  STATIC_REQUIRE(so::field_count<Twelve> == 12);
  STATIC_REQUIRE(so::field_count<so::AdamW> == 6);
  STATIC_REQUIRE_FALSE(so::detail::PlainFields<Thirteen>);
  STATIC_REQUIRE_FALSE(so::detail::PlainFields<WithArray>);
  STATIC_REQUIRE_FALSE(so::detail::PlainFields<WithAggregate>);
  STATIC_REQUIRE_FALSE(so::detail::PlainFields<int>);
}

TEST_CASE("Fields are visited in the order of their declaration, with their own types", "[rules][host]") {
  std::vector<double> seen;
  so::for_each_field(Twelve{}, [&](auto value) { seen.push_back(value); });
  REQUIRE(seen == std::vector<double>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12});

  Mixed mixed{true, 0.5, 7, Color::green};
  STATIC_REQUIRE(std::is_same_v<decltype(so::field<0>(mixed)), bool&>);
  STATIC_REQUIRE(std::is_same_v<decltype(so::field<3>(static_cast<const Mixed&>(mixed))), const Color&>);
  so::for_each_field(mixed, [](auto& value) { value = {}; });
  REQUIRE_FALSE(mixed.flag);
  REQUIRE(mixed.number == 0.0);
  REQUIRE(mixed.count == 0);
  REQUIRE(mixed.color == Color::red);

  int calls = 0;
  so::for_each_field(Nothing{}, [&](auto) { ++calls; });
  REQUIRE(calls == 0);
}
