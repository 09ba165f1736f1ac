// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_test_macros.hpp>
#include <shardopt/core/digest.hpp>

#include <cstdint>
#include <initializer_list>
#include <set>
#include <string_view>

namespace so = shardopt;

namespace {

std::uint64_t digest_of(std::initializer_list<std::string_view> texts) {
  so::Digest digest;
  for (const auto text : texts) digest.add(text);
  return digest.value();
}

}  // namespace

TEST_CASE("A digest depends on contents, order and borders", "[core][host]") {
  const std::set<std::uint64_t> values{digest_of({}),          digest_of({""}),           digest_of({"", ""}),
                                       digest_of({"ab", "c"}), digest_of({"a", "bc"}),    digest_of({"abc"}),
                                       digest_of({"c", "ab"}), digest_of({"ab", "d"}),    digest_of({"a"}),
                                       digest_of({"a", "a"}),  digest_of({"ab", "c", ""})};
  CHECK(values.size() == 11);
  CHECK(digest_of({"ab", "c"}) == digest_of({"ab", "c"}));
}

TEST_CASE("A digest tells words apart that differ in one bit", "[core][host]") {
  std::set<std::uint64_t> values;
  for (int bit = 0; bit < 64; ++bit) {
    so::Digest digest;
    digest.add(std::uint64_t{1} << bit);
    values.insert(digest.value());
  }
  CHECK(values.size() == 64);
}

TEST_CASE("An element's digest depends on its bits and its place", "[core][host]") {
  using so::detail::element_digest;
  CHECK(element_digest(1, std::uint16_t{7}) == element_digest(1, std::uint32_t{7}));
  CHECK(element_digest(1, std::uint16_t{7}) != element_digest(2, std::uint16_t{7}));
  CHECK(element_digest(1, std::uint16_t{7}) != element_digest(1, std::uint16_t{8}));
  CHECK(element_digest(0, std::uint16_t{1}) + element_digest(1, std::uint16_t{2}) !=
        element_digest(0, std::uint16_t{2}) + element_digest(1, std::uint16_t{1}));
}
