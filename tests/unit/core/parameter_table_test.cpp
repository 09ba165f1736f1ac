// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_test_macros.hpp>
#include <shardopt/core/parameter_table.hpp>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

namespace so = shardopt;

namespace {

/// Adding this must be refused with these words, and leave the table as it is.
void require_refused(so::ParameterTable& table, const so::ParameterInfo& info, const std::string& words) {
  const std::size_t size = table.size();
  const std::int64_t elements = table.trainable_elements();
  std::string message;
  try {
    table.add(info);
  } catch (const std::invalid_argument& error) {
    message = error.what();
  }
  CAPTURE(message, words);
  CHECK(message.find(words) != std::string::npos);
  CHECK(table.size() == size);
  CHECK(table.trainable_elements() == elements);
}

}  // namespace

TEST_CASE(
    "The flat index counts trainable elements in table order, without gaps, frozen parameters and aliases",
    "[core][host]") {
  so::ParameterTable table;
  const auto a = table.add({.name = "a", .shape = {2, 3}, .offset = 100});
  const auto frozen = table.add({.name = "frozen", .shape = {50}, .offset = 0, .frozen = true});
  const auto empty = table.add({.name = "empty", .shape = {0, 8}, .offset = 7});
  const auto alias = table.add({.name = "alias", .shape = {2, 3}, .alias_of = "a"});
  const auto scalar = table.add({.name = "scalar", .offset = 99});
  const auto again = table.add({.name = "again", .shape = {2, 3}, .alias_of = "alias"});

  CHECK(table.size() == 6);
  CHECK(table.trainable_elements() == 7);
  CHECK(table[a].flat == so::Range{0, 6});
  CHECK(table[frozen].flat.empty());
  CHECK(table[empty].flat == so::Range{6, 6});
  CHECK(table[alias].flat.empty());
  CHECK(table[scalar].flat == so::Range{6, 7});
  CHECK(table.storage_of(alias) == a);
  CHECK(table.storage_of(again) == a);
  CHECK(table.storage_of(scalar) == scalar);
  CHECK(table[again].offset == 100);
  CHECK(table.id_of("empty") == empty);
  CHECK_FALSE(table.separate());
  CHECK_THROWS_AS(table.id_of("nobody"), std::invalid_argument);
  CHECK_THROWS_AS(table.storage_of({6}), std::invalid_argument);
}

TEST_CASE("Names that are missing or repeated are refused", "[core][host]") {
  so::ParameterTable table;
  table.add({.name = "a", .shape = {4}, .offset = 0});
  require_refused(table, {.name = "", .shape = {4}, .offset = 4}, "needs a name");
  require_refused(table, {.name = "a", .shape = {4}, .offset = 4}, "'a' is in the table already");
  require_refused(table, {.name = "a", .shape = {4}, .alias_of = "a"}, "'a' is in the table already");
}

TEST_CASE("Places that overlap are refused from either side, with both names", "[core][host]") {
  so::ParameterTable table;
  table.add({.name = "low", .shape = {10}, .offset = 10});
  table.add({.name = "high", .shape = {10}, .offset = 40, .frozen = true});
  require_refused(table, {.name = "x", .shape = {10}, .offset = 1},
                  "'x' at elements 1..11 overlaps 'low' at 10..20");
  require_refused(table, {.name = "x", .shape = {1}, .offset = 19}, "overlaps 'low'");
  require_refused(table, {.name = "x", .shape = {1}, .offset = 10}, "overlaps 'low'");
  require_refused(table, {.name = "x", .shape = {100}, .offset = 0}, "overlaps");
  require_refused(table, {.name = "x", .shape = {21}, .offset = 20}, "overlaps 'high'");
  require_refused(table, {.name = "x", .shape = {5}, .offset = 45}, "alias_of");
  CHECK_NOTHROW(table.add({.name = "between", .shape = {20}, .offset = 20}));
  CHECK_NOTHROW(table.add({.name = "before", .shape = {10}, .offset = 0}));
  CHECK_NOTHROW(table.add({.name = "nothing", .shape = {0}, .offset = 15}));
}

TEST_CASE("A parameter has one place, of the kind the table has", "[core][host]") {
  float memory[20] = {};
  so::ParameterTable flat;
  flat.add({.name = "a", .shape = {4}, .offset = 0});
  require_refused(flat, {.name = "b", .shape = {4}}, "has no place");
  require_refused(flat, {.name = "b", .shape = {4}, .offset = 4, .parameter = memory},
                  "has an offset and pointers");
  require_refused(flat, {.name = "b", .shape = {4}, .parameter = memory, .gradient = memory + 8},
                  "mixes offsets and pointers");
  require_refused(flat, {.name = "b", .shape = {4}, .offset = 4, .alias_of = "a"},
                  "is an alias and needs no place");

  so::ParameterTable separate;
  separate.add({.name = "a", .shape = {4}, .parameter = memory, .gradient = memory + 4});
  CHECK(separate.separate());
  require_refused(separate, {.name = "b", .shape = {4}, .parameter = memory + 8}, "has no place");
  require_refused(separate, {.name = "b", .shape = {4}, .offset = 0}, "mixes offsets and pointers");
  CHECK_NOTHROW(separate.add({.name = "frozen", .shape = {4}, .parameter = memory + 8, .frozen = true}));
  CHECK_NOTHROW(separate.add({.name = "empty", .shape = {0}}));
}

TEST_CASE("An alias names an earlier parameter of its shape and takes its group", "[core][host]") {
  so::ParameterTable table;
  table.add({.name = "a", .shape = {2, 3}, .offset = 0, .group = "decay", .frozen = true});
  require_refused(table, {.name = "b", .shape = {2, 3}, .alias_of = "later"},
                  "'later', which is not in the table");
  require_refused(table, {.name = "b", .shape = {3, 2}, .alias_of = "a"},
                  "has shape [3, 2] but is an alias of 'a' with shape [2, 3]");
  const auto b = table.add({.name = "b", .shape = {2, 3}, .alias_of = "a"});
  CHECK(table[b].group == "decay");
  CHECK(table[b].frozen);
  CHECK_NOTHROW(table.add({.name = "c", .shape = {2, 3}, .group = "decay", .frozen = true, .alias_of = "b"}));
}

TEST_CASE("An alias that is given another group than its parameter's, or as frozen, is refused",
          "[core][host]") {
  so::ParameterTable table;
  table.add({.name = "a", .shape = {6}, .offset = 0, .group = "decay"});
  require_refused(table, {.name = "b", .shape = {6}, .group = "plain", .alias_of = "a"},
                  "is given group 'plain' but is an alias of 'a', which is in group 'decay'");
  require_refused(table, {.name = "b", .shape = {6}, .frozen = true, .alias_of = "a"}, "freeze that");
}

TEST_CASE("What was refused does not decide whether a table has offsets or pointers", "[core][host]") {
  float memory[8] = {};
  constexpr std::int64_t limit = (std::numeric_limits<std::int64_t>::max)();
  so::ParameterTable table;
  require_refused(table, {.name = "a", .shape = {2}, .offset = limit}, "ends beyond 2^63-1");
  CHECK_NOTHROW(table.add({.name = "a", .shape = {4}, .parameter = memory, .gradient = memory + 4}));
  CHECK(table.separate());
  so::ParameterTable flat;
  require_refused(flat, {.name = "a", .shape = {limit, 2}, .parameter = memory, .gradient = memory},
                  "is too large");
  CHECK_NOTHROW(flat.add({.name = "a", .shape = {4}, .offset = 0}));
}

TEST_CASE("Sizes and ends beyond 64 bits are refused", "[core][host]") {
  constexpr std::int64_t limit = (std::numeric_limits<std::int64_t>::max)();
  so::ParameterTable table;
  require_refused(table, {.name = "a", .shape = {limit, 2}, .offset = 0}, "'a' is too large");
  require_refused(table, {.name = "a", .shape = {10}, .offset = limit - 5}, "ends beyond 2^63-1");
  CHECK_THROWS_AS(table.add({.name = "a", .shape = {1}, .offset = -1}), std::invalid_argument);
  float memory = 0;
  so::ParameterTable separate;
  separate.add({.name = "a", .shape = {limit}, .parameter = &memory, .gradient = &memory});
  require_refused(separate, {.name = "b", .shape = {1}, .parameter = &memory, .gradient = &memory},
                  "ends beyond 2^63-1");
}
