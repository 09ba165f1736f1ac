// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>
#include <shardopt/zero/shard_layout.hpp>
#include <support/foreign_policies.hpp>
#include <support/small_engine.hpp>

#include <cstdint>
#include <vector>

using namespace test;
using so::detail::Bucket;
using so::detail::Segment;
using so::detail::ShardLayout;

namespace {

ShardLayout layout_of(const so::ParameterTable& table, const auto& policy, int rank, int world) {
  return {table, {"default"}, policy, rank, world, 4};
}

}  // namespace

TEST_CASE("Segments of a bucket are in block order, and blocks cover it", "[zero][host]") {
  const int world = GENERATE(1, 2, 3, 8);
  const auto table = table_of_sizes({700, 1, 0, 513, 2049});
  const auto check = [&](const auto& policy) {
    const ShardLayout layout = layout_of(table, policy, 0, world);
    std::int64_t at = 0;
    for (const Bucket& bucket : layout.buckets()) {
      CHECK(bucket.flat.begin == at);
      at = bucket.flat.end;
      std::int64_t block = 0;
      int owner = 0;
      for (const Segment& segment : bucket.segments) {
        CHECK(segment.owner >= owner);
        CHECK(segment.block == block);
        CHECK(bucket.blocks().block(segment.owner).contains(block));
        owner = segment.owner;
        block += segment.flat.size();
      }
      CHECK(block == bucket.flat.size());
      CHECK(bucket.blocks().elements() == bucket.flat.size());
    }
    CHECK(at == table.trainable_elements());
  };
  check(so::FlatSharding{.bucket_bytes = 3000});
  check(so::PerParameterSharding{.bucket_bytes = 3000});
  check(ScatterSharding{});
}

TEST_CASE("The buckets of a run of elements are those that hold one of them", "[zero][host]") {
  const auto table = table_of_sizes({700, 1, 513});
  const ShardLayout layout = layout_of(table, so::FlatSharding{.bucket_bytes = 1}, 0, 2);  // 512, 512, 190
  CHECK(layout.buckets_of({0, 700}) == so::Range{0, 2});
  CHECK(layout.buckets_of({700, 701}) == so::Range{1, 2});
  CHECK(layout.buckets_of({701, 1214}) == so::Range{1, 3});
  CHECK(layout.buckets_of({512, 1024}) == so::Range{1, 2});
  CHECK(layout.buckets_of({511, 513}) == so::Range{0, 2});
  CHECK(layout.buckets_of({5, 5}).empty());
}

TEST_CASE("A bucket is communicated in place only where its block order is the order in memory",
          "[zero][host]") {
  so::ParameterTable reversed;
  reversed.add({.name = "a", .shape = {100}, .offset = 100});
  reversed.add({.name = "b", .shape = {100}, .offset = 0});
  so::ParameterTable gap;
  gap.add({.name = "a", .shape = {100}, .offset = 0});
  gap.add({.name = "b", .shape = {100}, .offset = 101});
  so::ParameterTable frozen_between;
  frozen_between.add({.name = "a", .shape = {100}, .offset = 0});
  frozen_between.add({.name = "f", .shape = {3}, .offset = 100, .frozen = true});
  frozen_between.add({.name = "b", .shape = {100}, .offset = 103});
  const auto in_place = [](const so::ParameterTable& table, const auto& policy) {
    return layout_of(table, policy, 0, 2).buckets().at(0).in_place;
  };
  CHECK(in_place(table_of_sizes({100, 100}), so::FlatSharding{}));
  CHECK(in_place(table_of_sizes({100, 0, 100}), so::FlatSharding{}));
  CHECK_FALSE(in_place(reversed, so::FlatSharding{}));
  CHECK_FALSE(in_place(gap, so::FlatSharding{}));
  CHECK_FALSE(in_place(frozen_between, so::FlatSharding{}));
  CHECK_FALSE(in_place(table_of_sizes({1000}), ScatterSharding{}));
}

TEST_CASE("Tiles are cut at multiples of 2048 of the flat index", "[zero][host]") {
  using so::detail::tiles_in;
  CHECK(tiles_in(so::Range{0, 0}) == 0);
  CHECK(tiles_in(so::Range{0, 1}) == 1);
  CHECK(tiles_in(so::Range{0, 2048}) == 1);
  CHECK(tiles_in(so::Range{0, 2049}) == 2);
  CHECK(tiles_in(so::Range{2047, 2049}) == 2);
  CHECK(tiles_in(so::Range{2048, 4096}) == 1);
  std::vector<float> memory(5000);
  std::vector<so::Tile> tiles;
  so::detail::append_tiles(Segment{.flat = {2000, 4500}, .owner = 0, .entry = 0, .group = 3, .block = 0},
                           memory.data(), memory.data() + 100, 70, tiles);
  REQUIRE(tiles.size() == 3);
  CHECK(tiles[0].count == 48);
  CHECK(tiles[0].phase == 2000 % 256);
  CHECK(tiles[1].count == 2048);
  CHECK(tiles[1].phase == 0);
  CHECK(tiles[1].state == 118);
  CHECK(tiles[1].parameter == memory.data() + 48);
  CHECK(tiles[1].gradient == memory.data() + 148);
  CHECK(tiles[2].count == 404);
  CHECK(tiles[2].group == 3);
}
