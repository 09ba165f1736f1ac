// SPDX-License-Identifier: Apache-2.0
// What users of such systems reported about layouts: sizes, empty parameters, alignment, buckets, 64-bit
// counts.
#include <catch2/catch_approx.hpp>
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <support/small_engine.hpp>
#include <support/watched_collective.hpp>

#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

using namespace test;
using Catch::Approx;

namespace {

using Sgd = ThreadsOptimizer<so::SGD>;

}  // namespace

TEMPLATE_TEST_CASE("Groups with fewer elements than ranks train like any other", "[reports][B001][host]",
                   so::FlatSharding, so::PerParameterSharding) {
  using Optimizer = ThreadsOptimizer<so::SGD, so::FullPrecision, TestType>;
  const int world = GENERATE(1, 2, 3, 4, 8);
  const std::int64_t cut = GENERATE(std::int64_t{1}, grain);
  CAPTURE(world, cut);
  const auto table = packed_table({{"a", {5 * cut}, "A"}, {"b", {1 * cut}, "B"}});
  std::vector<std::int64_t> owned(static_cast<std::size_t>(world));
  const auto values = on_ranks(world, [&](HostThreads comm) {
    const int rank = comm.rank();
    Engine<Optimizer> engine(table, {.groups = {{"A", {.lr = 0.1}}, {"B", {.lr = 0.1}}}}, std::move(comm));
    owned[static_cast<std::size_t>(rank)] = engine.optimizer.memory_plan().owned_parameters;
    engine.fill_gradients(rank + 1);
    engine.step({.gradient_scale = 1.0f / static_cast<float>(world)});
    return engine.values();
  });
  std::int64_t sum = 0;
  for (const std::int64_t elements : owned) sum += elements;
  CHECK(sum == 6 * cut);
  for (const auto& rank : values) {
    for (const double p : rank) REQUIRE(p == Approx(-0.1 * (world + 1) / 2).epsilon(1e-6));
  }
}

TEMPLATE_TEST_CASE("Empty parameters keep their shapes and hide no neighbour, wherever they stand",
                   "[reports][B002][host]", so::FlatSharding, so::PerParameterSharding, so::Replicated) {
  using Optimizer = ThreadsOptimizer<so::Adam, so::FullPrecision, TestType>;
  const std::vector<std::vector<so::Shape>> layouts = {
      {{8 * grain}, {0, 8}, {24 * grain}},       // inside what rank 0 owns
      {{16 * grain}, {8, 0}},                    // at the end
      {{0, 8}, {16 * grain}, {3}},               // at the start
      {{5}, {8, 0}, {0, 8}, {0}, {16 * grain}},  // three in a row
      {{0, 8}, {8, 0}, {0}},                     // nothing else
  };
  const int world = GENERATE(1, 2, 3);
  for (const auto& shapes : layouts) {
    std::vector<Packed> tensors;
    for (const so::Shape& shape : shapes) tensors.push_back({"p" + std::to_string(tensors.size()), shape});
    const auto table = packed_table(tensors);
    std::vector<std::vector<so::Shape>> kept(static_cast<std::size_t>(world));
    const auto values = on_ranks(world, [&](HostThreads comm) {
      auto& mine = kept[static_cast<std::size_t>(comm.rank())];
      Engine<Optimizer> engine(
          table, {.groups = {{"default", {.lr = 0.1}}}, .sharding = {.bucket_bytes = 4096}}, std::move(comm));
      for (std::uint32_t k = 0; k < shapes.size(); ++k)
        engine.optimizer.gradient_ready(so::ParameterId{k}, {});
      for (auto& g : engine.gradients) g = 1;
      engine.fill_gradients(1);
      engine.step();
      for (std::uint32_t k = 0; k < shapes.size(); ++k)
        engine.optimizer.wait_parameters(so::ParameterId{k}, {});
      for (const auto& entry : engine.optimizer.table().entries()) mine.push_back(entry.shape);
      return engine.values();
    });
    for (const auto& mine : kept) CHECK(mine == shapes);
    CAPTURE(world, shapes.size());
    for (const auto& rank : values) {
      for (const double p : rank) REQUIRE(std::fabs(p + 0.1) <= 1e-7);
    }
  }
}

TEMPLATE_TEST_CASE("Odd sizes and unaligned buffers update every element", "[reports][B008][host]",
                   (so::Mixed<float, float, float>), (so::Mixed<so::bf16, so::bf16, float>),
                   (so::Mixed<so::bf16, float, float>), (so::Mixed<so::fp16, so::fp16, float>)) {
  using Optimizer = ThreadsOptimizer<so::Adam, TestType>;
  using Param = typename TestType::Param;
  using Grad = typename TestType::Grad;
  const int world = GENERATE(1, 2, 3);
  const std::size_t shift =
      GENERATE(0U, 1U, 2U, 3U);  // elements behind a 16-byte boundary: 2 and 4 bytes, and more
  CAPTURE(world, shift);
  const auto table = table_of_sizes({3, 5, 7, 1, 64, 9});
  const auto values = on_ranks(world, [&](HostThreads comm) {
    alignas(16) Param parameters[96] = {};
    alignas(16) Grad gradients[96] = {};
    for (Grad& g : gradients) g = rounded<Grad>(1.0);
    Optimizer optimizer(table, {.groups = {{"default", {.lr = 0.1}}}}, std::move(comm),
                        so::FlatBuffers{parameters + shift, gradients + shift}, {});
    optimizer.step({.gradient_scale = 1.0f / static_cast<float>(world)}, {});
    std::vector<double> result;
    for (std::size_t i = 0; i < 89; ++i) result.push_back(value_of(parameters[shift + i]));
    for (std::size_t i = 0; i < 96; ++i) {
      if ((i < shift || i >= shift + 89) && value_of(parameters[i]) != 0) result.push_back(1e9);
    }
    return result;
  });
  const double expected = so::dtype_of<Param> == so::Dtype::bf16   ? -0.10009765625
                          : so::dtype_of<Param> == so::Dtype::fp16 ? -0.0999755859375
                                                                   : -0.1;
  for (const auto& rank : values) {
    REQUIRE(rank.size() == 89);
    for (const double p : rank) REQUIRE(std::fabs(p - expected) <= 1e-7);
  }
}

TEMPLATE_TEST_CASE("A bucket of no bytes is refused by its name", "[reports][B011][host]", so::FlatSharding,
                   so::PerParameterSharding, so::Replicated) {
  using Optimizer = ThreadsOptimizer<so::SGD, so::FullPrecision, TestType>;
  const std::int64_t bytes = GENERATE(0, -1, -4096);
  const auto table = table_of_sizes({10, 3, 1});
  for (const auto& message : messages_of_ranks<std::invalid_argument>(2, [&](HostThreads comm) {
         Engine<Optimizer> engine(table, {.sharding = {.bucket_bytes = bytes}}, std::move(comm));
       })) {
    CHECK(message.find("bucket_bytes") != std::string::npos);
  }
}

TEMPLATE_TEST_CASE("Parameters larger than a bucket are reduced whole, and every rank makes the same calls",
                   "[reports][B011][B064][host]", so::FlatSharding, so::PerParameterSharding) {
  using Optimizer = so::ZeroOptimizer<so::SGD, TestType, Watched<HostThreads>, so::FullPrecision>;
  const std::int64_t capacity = GENERATE(1, 4, 10);
  const std::int64_t cut = GENERATE(std::int64_t{1}, grain);
  const int world = GENERATE(2, 8);
  CAPTURE(capacity, cut, world);
  const auto table = table_of_sizes({10 * cut, 3 * cut, 1 * cut});
  std::vector<std::shared_ptr<CallLog>> logs;
  for (int rank = 0; rank < world; ++rank) logs.push_back(std::make_shared<CallLog>());
  const auto values = on_ranks(world, [&](HostThreads comm) {
    const int rank = comm.rank();
    Engine<Optimizer> engine(
        table, {.groups = {{"default", {.lr = 1}}}, .sharding = {.bucket_bytes = 4 * capacity * cut}},
        Watched<HostThreads>(std::move(comm), logs[static_cast<std::size_t>(rank)]));
    logs[static_cast<std::size_t>(rank)]->calls.clear();
    engine.fill_gradients(rank == 0 ? 1 : rank == 1 ? 3 : 0);
    engine.step({.gradient_scale = 0.5f});
    return engine.values();
  });
  for (const auto& rank : values)
    REQUIRE(rank == std::vector<double>(static_cast<std::size_t>(14 * cut), -2.0));
  const auto without_own = [](std::vector<CallLog::Call> calls) {
    for (auto& call : calls) call.own = 0;
    return calls;
  };
  std::int64_t reduced = 0;
  for (const auto& call : logs[0]->calls) {
    if (call.operation == "reduce_scatter") {
      CHECK(call.elements > 0);
      reduced += call.elements;
    }
  }
  CHECK(reduced == 14 * cut);
  for (const auto& log : logs) CHECK(without_own(log->calls) == without_own(logs[0]->calls));
}

TEMPLATE_TEST_CASE("Plans count beyond 32 bits, without memory", "[reports][B012][host]", so::FlatSharding,
                   so::PerParameterSharding) {
  using Optimizer = ThreadsOptimizer<so::SGD, so::FullPrecision, TestType>;
  const auto shares = [](std::int64_t grains, int world) {
    so::ParameterTable table;
    table.add({.name = "w", .shape = {grains * grain}, .offset = 0});
    std::vector<std::int64_t> result;
    for (int rank = 0; rank < world; ++rank) {
      const auto plan = Optimizer::plan(table, {.sharding = {.bucket_bytes = std::int64_t{1} << 52}},
                                        {.rank = rank, .world = world});
      CHECK(plan.parameter_bytes == 4 * grains * grain);
      result.push_back(plan.owned_parameters / grain);
      CHECK(plan.owned_parameters % grain == 0);
    }
    return result;
  };
  CHECK(shares(2147483652, 2) == std::vector<std::int64_t>(2, 1073741826));
  CHECK(shares(2147483652, 3) == std::vector<std::int64_t>(3, 715827884));
  const auto eight = shares(4294967297, 8);
  std::int64_t sum = 0;
  for (const std::int64_t share : eight) {
    CHECK((share == 536870912 || share == 536870913));
    sum += share;
  }
  CHECK(sum == 4294967297);
}

TEST_CASE("Offsets, bytes and products of dimensions are 64 bits wide, and what is wider is refused",
          "[reports][B014][host]") {
  so::ParameterTable table;
  std::int64_t offset = 0;
  for (const char* name : {"a", "b", "c"}) {
    table.add({.name = name, .shape = {1200000000}, .offset = offset});
    offset += 1200000000;
  }
  CHECK(table.entries()[1].offset == 1200000000);
  CHECK(table.entries()[2].offset == 2400000000);
  CHECK(table.entries()[2].flat == so::Range{2400000000, 3600000000});
  CHECK(ThreadsOptimizer<so::AdamW>::plan(table, {}, {.rank = 1, .world = 4}).parameter_bytes == 14400000000);
  CHECK(so::Shape{65536, 50257}.numel() == 3293642752);
  CHECK(so::Shape{64, 1024, 50257}.numel() == 3293642752);
  const std::int64_t large = std::int64_t{1} << 40;
  CHECK(message_of<std::invalid_argument>([&] {
          static_cast<void>(so::Shape{large, large}.numel());
        }).find("64 bits") != std::string::npos);
  CHECK(message_of<std::invalid_argument>([&] {
          table.add({.name = "d", .shape = {large, large}, .offset = offset});
        }).find("'d' is too large") != std::string::npos);
}
