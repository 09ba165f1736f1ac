// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_approx.hpp>
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <shardopt/zero/memory_plan.hpp>
#include <support/small_engine.hpp>

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

using namespace test;
using Catch::Approx;

namespace {

using Bf16 = so::Mixed<so::bf16, so::bf16, float>;
using Bf16Fp32 = so::Mixed<so::bf16, float, float>;

/// A large model: a hundred tensors of equal size.
so::ParameterTable model(std::int64_t parameters) {
  so::ParameterTable table;
  for (std::int64_t k = 0; k < 100; ++k)
    table.add({.name = std::string("w").append(std::to_string(k)),
               .shape = {parameters / 100},
               .offset = k * (parameters / 100)});
  return table;
}

template <class Optimizer>
so::MemoryPlan plan(std::int64_t parameters, int rank, int world) {
  const auto start = std::chrono::steady_clock::now();
  const auto result = Optimizer::plan(model(parameters), {}, {.rank = rank, .world = world});
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(30));  // elements are never touched
  return result;
}

constexpr double giga = 1e9;

}  // namespace

TEMPLATE_TEST_CASE("16 GB of Adam's states become 2 GB a rank at 8 ranks", "[zero][law10][host]",
                   so::FlatSharding, so::PerParameterSharding) {
  using Optimizer = ThreadsOptimizer<so::AdamW, so::FullPrecision, TestType>;
  std::int64_t sum = 0;
  for (int rank = 0; rank < 8; ++rank) {
    const auto mine = plan<Optimizer>(2000000000, rank, 8);
    CHECK(mine.unsharded_state_bytes == 16000000000);
    CHECK(static_cast<double>(mine.state_bytes) / giga == Approx(2).epsilon(1e-4));
    CHECK(static_cast<double>(mine.device_bytes) / giga <
          2.2);  // and the map of tiles, 16 bytes a thousand elements
    sum += mine.state_bytes;
  }
  CHECK(sum == 16000000000);
}

TEST_CASE(
    "7.5 thousand million parameters in 16 bits with fp32 masters on 64 ranks take 31.4 GB instead of 120 GB",
    "[zero][law10][host]") {
  const auto mine = plan<ThreadsOptimizer<so::Adam, Bf16>>(7500000000, GENERATE(0, 63), 64);
  CHECK(static_cast<double>(mine.model_bytes()) / giga == Approx(31.4).epsilon(1e-3));
  CHECK(static_cast<double>(mine.unsharded_model_bytes()) / giga == Approx(120).epsilon(1e-9));
}

TEST_CASE("Bytes a parameter are those of the memory table", "[zero][law10][host]") {
  const int world = GENERATE(1, 2, 8);
  constexpr std::int64_t parameters = 100 * 256 * 8;
  const auto each = [&](const so::MemoryPlan& mine) {
    return static_cast<double>(mine.model_bytes()) / static_cast<double>(parameters);
  };
  CHECK(each(plan<ThreadsOptimizer<so::Adam>>(parameters, 0, world)) == 4 + 4 + 8.0 / world);
  CHECK(each(plan<ThreadsOptimizer<so::Adam, Bf16>>(parameters, 0, world)) == 2 + 2 + 12.0 / world);
  CHECK(each(plan<ThreadsOptimizer<so::Adam, Bf16Fp32>>(parameters, 0, world)) == 2 + 4 + 12.0 / world);
  CHECK(each(plan<ThreadsOptimizer<so::AdamAmsgrad>>(parameters, 0, world)) == 4 + 4 + 12.0 / world);
  CHECK(each(plan<ThreadsOptimizer<so::SGD>>(parameters, 0, world)) == 4 + 4);  // no momentum, no state
  CHECK(each(plan<ThreadsOptimizer<so::Adam, Bf16, so::Replicated>>(parameters, 0, world)) == 2 + 2 + 12);
}

TEST_CASE("SGD's momentum is planned if any group has it", "[zero][host]") {
  using Optimizer = ThreadsOptimizer<so::SGD>;
  const auto table = packed_table({{"a", {1000}, "x"}, {"b", {1000}, "y"}});
  const auto bytes = [&](double x, double y) {
    return Optimizer::plan(table, {.groups = {{"x", {.momentum = x}}, {"y", {.momentum = y}}}},
                           {.rank = 0, .world = 1})
        .state_bytes;
  };
  CHECK(bytes(0, 0) == 0);
  CHECK(bytes(0, 0.9) == 8000);
  CHECK(bytes(0.9, 0) == 8000);
}

TEST_CASE("Frozen parameters and aliases take no state and are not counted", "[zero][host]") {
  const auto table = packed_table(
      {{"a", {6}}, {"frozen", {400}, "default", true}, {"tied", {6}, "default", false, "a"}, {"b", {3}}});
  const auto mine = ThreadsOptimizer<so::Adam, Bf16>::plan(table, {}, {.rank = 0, .world = 1});
  CHECK(mine.parameters == 9);
  CHECK(mine.owned_parameters == 9);
  CHECK(mine.state_bytes == 9 * 8);
  CHECK(mine.master_bytes == 9 * 4);
  CHECK(mine.parameter_bytes == 18);
}

TEST_CASE("State buffers lie in the arena one behind the other, aligned, or outside where they are adopted",
          "[zero][host]") {
  const auto table = table_of_sizes({1000});
  using Optimizer = ThreadsOptimizer<so::Adam, Bf16>;
  const auto mine = Optimizer::plan(table, {}, {.rank = 0, .world = 1});
  REQUIRE(mine.buffers.size() == 3);
  CHECK(mine.buffers[0].name == "exp_avg");
  CHECK(mine.buffers[1].name == "exp_avg_sq");
  CHECK(mine.buffers[2].name == "master");
  std::int64_t end = 0;
  for (const auto& buffer : mine.buffers) {
    CHECK(buffer.bytes == 4000);
    CHECK(buffer.offset_bytes % 256 == 0);
    CHECK(buffer.offset_bytes >= end);
    end = buffer.offset_bytes + buffer.bytes;
    CHECK(end <= mine.device_bytes);
  }
  const auto adopted = Optimizer::plan(table, {}, {.rank = 0, .world = 1}, true);
  for (const auto& buffer : adopted.buffers) CHECK(buffer.offset_bytes == -1);
  CHECK(adopted.device_bytes == mine.device_bytes - 3 * 4096);
  CHECK(adopted.state_bytes == mine.state_bytes);
}

TEST_CASE("A staging bucket is planned only where buckets are scattered, as wide as the wider type",
          "[zero][host]") {
  using Optimizer = ThreadsOptimizer<so::Adam, Bf16Fp32>;
  so::ParameterTable scattered;
  scattered.add({.name = "a", .shape = {600}, .offset = 0});
  scattered.add({.name = "b", .shape = {400}, .offset = 700});
  CHECK(Optimizer::plan(table_of_sizes({600, 400}), {}, {.rank = 0, .world = 2}).staging_bytes == 0);
  CHECK(Optimizer::plan(scattered, {}, {.rank = 0, .world = 2}).staging_bytes == 4000);
  // Buckets of 512: 0-512 lies in one piece, 512-1000 does not.
  CHECK(
      Optimizer::plan(scattered, {.sharding = {.bucket_bytes = 1}}, {.rank = 0, .world = 2}).staging_bytes ==
      4 * 488);
}

TEST_CASE("A rank that does not exist is refused", "[zero][law9][host]") {
  const auto table = table_of_sizes({10});
  using Optimizer = ThreadsOptimizer<so::Adam>;
  for (const auto& [rank, world] : {std::pair(-1, 4), std::pair(4, 4), std::pair(0, 0), std::pair(0, -2)}) {
    const auto message = message_of<std::invalid_argument>(
        [&, r = rank, w = world] { static_cast<void>(Optimizer::plan(table, {}, {.rank = r, .world = w})); });
    CHECK(message.find("rank " + std::to_string(rank)) != std::string::npos);
  }
}

TEST_CASE("More ranks than an ordered reduction can have are refused, with what would work",
          "[zero][law9][host]") {
  using Optimizer = ThreadsOptimizer<so::Adam, Bf16>;
  const auto table = table_of_sizes({10, 300});
  CHECK_NOTHROW(Optimizer::plan(table, {}, {.rank = 0, .world = so::most_ordered_ranks}));
  const auto message = message_of<std::invalid_argument>(
      [&] { static_cast<void>(Optimizer::plan(table, {}, {.rank = 0, .world = 4096})); });
  CHECK(message.find("at most 4095 ranks, not 4096; choose Reduction::native") != std::string::npos);
}

TEST_CASE("More elements than bytes can be counted for are refused, as many as can are planned",
          "[zero][host]") {
  const auto refusal = [](auto optimizer, std::int64_t elements, std::int64_t bucket_bytes) {
    using Optimizer = typename decltype(optimizer)::type;
    so::ParameterTable table;
    table.add({.name = "w", .shape = {elements}, .offset = 0});
    return message_of<std::invalid_argument>([&] {
      static_cast<void>(Optimizer::plan(table, {.sharding = {.bucket_bytes = bucket_bytes}}, {.world = 3}));
    });
  };
  constexpr std::int64_t any = INT64_MAX;
  for (const std::int64_t elements : {(std::int64_t{1} << 48) + 1, std::int64_t{1} << 61, any}) {
    CAPTURE(elements);
    const std::string told = std::to_string(elements) + " trainable elements; at most 2^48";
    CHECK(refusal(std::type_identity<ThreadsOptimizer<so::Adam>>{}, elements, any).find(told) !=
          std::string::npos);
    CHECK(refusal(std::type_identity<ThreadsOptimizer<so::Adam, Bf16, so::PerParameterSharding>>{}, elements,
                  any)
              .find(told) != std::string::npos);
    const std::vector<std::int64_t> begins{0};
    const so::FlatSpace space{elements, begins};
    CHECK_THROWS_AS(so::FlatSharding{}.plan(space, 8, 4), std::invalid_argument);
    CHECK_THROWS_AS(so::Replicated{}.plan(space, 8, 4), std::invalid_argument);
    CHECK_THROWS_AS(so::PerParameterSharding{}.plan(space, 8, 4), std::invalid_argument);
  }
  so::ParameterTable largest;
  largest.add({.name = "w", .shape = {std::int64_t{1} << 48}, .offset = 0});
  const auto mine =
      ThreadsOptimizer<so::Adam>::plan(largest, {.sharding = {.bucket_bytes = any}}, {.world = 2});
  CHECK(mine.parameter_bytes == std::int64_t{1} << 50);
  CHECK(mine.unsharded_model_bytes() == std::int64_t{1} << 52);
}

TEST_CASE("An empty table can be planned and trained", "[zero][host]") {
  const so::ParameterTable nothing;
  const auto results = on_ranks(2, [&](HostThreads comm) {
    Engine<ThreadsOptimizer<so::Adam>> engine(nothing, {.max_norm = 1}, std::move(comm));
    const auto result = engine.step();
    engine.optimizer.zero_gradients({});
    engine.optimizer.verify_parameters({});
    return std::pair(result.updates, result.norm);
  });
  for (const auto& result : results) CHECK(result == std::pair(std::int64_t{1}, 0.0));
}
