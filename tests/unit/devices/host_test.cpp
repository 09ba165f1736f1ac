// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <shardopt/devices/host.hpp>
#include <support/numbers.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

using namespace test;

namespace {

template <class T>
T any(std::uint64_t k) {
  return rounded<T>(
      std::ldexp(static_cast<double>(noise(71, k) % 2000001) / 1e6 - 1, static_cast<int>(noise(72, k) % 12)));
}

so::Tile tile_over(void* parameter, void* gradient, std::int64_t state, std::uint32_t count,
                   std::uint16_t phase = 0) {
  return {.parameter = parameter,
          .gradient = gradient,
          .state = state,
          .count = count,
          .group = 0,
          .phase = phase};
}

}  // namespace

TEMPLATE_TEST_CASE("Ranks' elements are added in fp32 and rounded once, in any lengths and places",
                   "[devices][host]", float, so::bf16, so::fp16) {
  const int world = GENERATE(1, 2, 3, 5, 8);
  const std::int64_t count = GENERATE(0, 1, 7, 8, 9, 257);
  CAPTURE(world, count);
  std::vector<std::vector<TestType>> ranks(static_cast<std::size_t>(world));
  std::vector<void*> sources;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    for (std::int64_t i = 0; i < count + 2; ++i)
      ranks[rank].push_back(any<TestType>(rank * 1000 + static_cast<std::size_t>(i)));
    sources.push_back(ranks[rank].data() + 1);
  }
  const auto before = ranks;
  so::Host::sum_ranks(so::dtype_of<TestType>, sources, sources.back(), count);  // in place on the last
  for (std::size_t i = 0; i < static_cast<std::size_t>(count) + 2; ++i) {
    std::vector<float> level;
    for (const auto& rank : before) level.push_back(static_cast<float>(value_of(rank[i])));
    while (level.size() > 1) {
      std::vector<float> next;
      for (std::size_t k = 0; k + 1 < level.size(); k += 2) next.push_back(level[k] + level[k + 1]);
      if (level.size() % 2 != 0) next.push_back(level.back());
      level = next;
    }
    const bool inside = i > 0 && i <= static_cast<std::size_t>(count);
    const TestType expected = inside ? rounded<TestType>(static_cast<double>(level[0])) : before.back()[i];
    REQUIRE(bits_of(ranks.back()[i]) == bits_of(expected));
  }
  for (std::size_t rank = 0; rank + 1 < ranks.size(); ++rank) CHECK(ranks[rank] == before[rank]);
}

TEST_CASE("Only floating-point elements are added over ranks", "[devices][host]") {
  std::int64_t word = 1;
  std::vector<void*> sources{&word};
  CHECK_THROWS_AS(so::Host::sum_ranks(so::Dtype::int64, sources, &word, 1), std::invalid_argument);
}

TEMPLATE_TEST_CASE("Squares are summed by grains, whatever is not finite is counted and left out",
                   "[devices][host]", float, so::bf16, so::fp16) {
  const auto phase = static_cast<std::uint16_t>(GENERATE(0, 1, 255));
  const std::uint32_t count = GENERATE(1U, 255U, 256U, 257U, 1000U, 2048U);
  const std::size_t shift = GENERATE(0U, 1U, 3U);
  CAPTURE(phase, count, shift);
  std::vector<TestType> gradients(count + shift);
  for (std::size_t i = 0; i < gradients.size(); ++i) gradients[i] = any<TestType>(i);
  gradients[shift + count / 2] = rounded<TestType>(std::numeric_limits<double>::quiet_NaN());
  gradients[shift] = rounded<TestType>(-std::numeric_limits<double>::infinity());
  std::int64_t limbs[so::exact_sum::Squares::limbs] = {};
  std::int64_t non_finite = 5;
  const so::Tile tile = tile_over(nullptr, gradients.data() + shift, 0, count, phase);
  so::Host{}.add_squares<TestType>(&tile, 1, limbs, &non_finite, {});

  ExactSum expected;
  for (std::uint32_t begin = 0; begin < count;) {
    const std::uint32_t end = std::min(begin == 0 ? 256U - phase : begin + 256U, count);
    double partial[32] = {};
    for (std::uint32_t i = begin; i < end; ++i) {
      const double value = value_of(gradients[shift + i]);
      if (std::isfinite(value)) partial[(i - begin) % 32] += value * value;
    }
    for (int apart = 16; apart > 0; apart /= 2) {
      for (int lane = 0; lane < apart; ++lane) partial[lane] += partial[lane + apart];
    }
    expected.add(partial[0]);
    begin = end;
  }
  CHECK(so::exact_sum::Squares::to_double(limbs) == expected.value());
  CHECK(non_finite == 5 + (count == 1 ? 1 : 2));
}

TEST_CASE("Tiles are packed to their places in a staging buffer, and back", "[devices][host]") {
  std::vector<float> a(600);
  std::vector<float> b(100);
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = static_cast<float>(i);
  for (std::size_t i = 0; i < b.size(); ++i) b[i] = -static_cast<float>(i);
  const std::vector<so::Tile> tiles{tile_over(a.data() + 10, nullptr, 50, 500),
                                    tile_over(b.data(), nullptr, 0, 50)};
  std::vector<float> staging(560, 9.0f);
  so::Host{}.pack(tiles.data(), 2, so::TileField::parameter, staging.data(), {});
  CHECK(staging[0] == 0);
  CHECK(staging[49] == -49);
  CHECK(staging[50] == 10);
  CHECK(staging[549] == 509);
  CHECK(staging[550] == 9);
  for (float& x : staging) x += 1000;
  so::Host{}.unpack(tiles.data(), 2, so::TileField::parameter, staging.data(), {});
  CHECK(a[9] == 9);
  CHECK(a[10] == 1010);
  CHECK(a[509] == 1509);
  CHECK(a[510] == 510);
  CHECK(b[49] == 951);
  CHECK(b[50] == -50);
}

TEST_CASE("A buffer's digest is the sum of its elements', however it is cut", "[devices][host]") {
  std::vector<std::uint16_t> elements(1000);
  for (std::size_t i = 0; i < elements.size(); ++i) elements[i] = static_cast<std::uint16_t>(noise(i));
  const so::Host host;
  std::uint64_t whole = 0;
  host.add_digest(elements.data(), 1000, 7, &whole, {});
  std::uint64_t parts = 0;
  host.add_digest(elements.data() + 300, 700, 307, &parts, {});
  host.add_digest(elements.data(), 300, 7, &parts, {});
  CHECK(whole == parts);
  std::uint64_t moved = 0;
  host.add_digest(elements.data(), 1000, 8, &moved, {});
  CHECK(moved != whole);
  elements[999] ^= 1;
  std::uint64_t changed = 0;
  host.add_digest(elements.data(), 1000, 7, &changed, {});
  CHECK(changed != whole);
}

TEST_CASE("Copies of any length bring every byte and touch no other", "[devices][host]") {
  const std::int64_t piece = so::detail::bytes_worth_a_copying_thread;
  const std::int64_t bytes = GENERATE_COPY(0, 1, piece - 1, 2 * piece + 1, 5 * piece + 13);
  const auto byte = [](std::size_t k) { return static_cast<unsigned char>(k * 0x9e3779b97f4a7c15U >> 56U); };
  std::vector<unsigned char> from(static_cast<std::size_t>(bytes + 1));
  for (std::size_t k = 0; k < from.size(); ++k) from[k] = byte(k);
  std::vector<unsigned char> to(static_cast<std::size_t>(bytes + 2), 42);
  const so::Host host;
  SECTION("up") { host.upload(to.data() + 1, from.data() + 1, bytes, {}); }
  SECTION("down") { host.download(to.data() + 1, from.data() + 1, bytes, {}); }
  SECTION("aside") { host.copy(to.data() + 1, from.data() + 1, bytes, {}); }
  CHECK(to.front() == 42);
  CHECK(to.back() == 42);
  CHECK(std::equal(from.begin() + 1, from.end(), to.begin() + 1, to.end() - 1));
}

TEST_CASE("Host memory is aligned to 256 bytes, and nothing may be asked for", "[devices][host]") {
  const so::Host host;
  for (const std::int64_t bytes : {0, 1, 4096}) {
    void* memory = host.allocate(bytes);
    void* pinned = host.allocate_pinned(bytes);
    CHECK(reinterpret_cast<std::uintptr_t>(memory) % 256 == 0);
    CHECK(reinterpret_cast<std::uintptr_t>(pinned) % 256 == 0);
    host.deallocate(memory);
    host.deallocate_pinned(pinned);
  }
  host.upload(nullptr, nullptr, 0, {});
  host.download(nullptr, nullptr, 0, {});
  host.fill_zero(nullptr, 0, {});
}
