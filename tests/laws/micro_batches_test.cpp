// SPDX-License-Identifier: Apache-2.0
// Law 2: what the result must not depend on, seen between runs of the library.
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <support/small_engine.hpp>

#include <vector>

using namespace test;

namespace {

/// The gradient of sample block `block` in a step: any float.
float block_gradient(std::uint64_t step, std::uint64_t block, std::int64_t i) {
  return static_cast<float>(static_cast<double>(noise(11, step, block, i) % 2000003) / 1.7e6 - 0.6);
}

/// Parameters of rank 0 after five steps in which rank r adds its micro-batches' gradients r·batches … before
/// it announces.
template <class Sharding>
std::vector<double> trained(int world, std::uint64_t batches, Sharding sharding) {
  const auto table = table_of_sizes({700, 1, 513, 2049});
  const auto parameters = on_ranks(world, [&](HostThreads comm) {
    const auto rank = static_cast<std::uint64_t>(comm.rank());
    Engine<ThreadsOptimizer<so::AdamW, so::FullPrecision, Sharding>> engine(
        table, {.sharding = sharding, .max_norm = 0.5f}, std::move(comm), 0.5);
    for (std::uint64_t step = 0; step < 5; ++step) {
      engine.optimizer.zero_gradients({});
      for (std::uint64_t k = 0; k < batches; ++k) {
        for (std::size_t i = 0; i < engine.gradients.size(); ++i) {
          engine.gradients[i] += block_gradient(step, rank * batches + k, static_cast<std::int64_t>(i));
        }
      }
      engine.step({.lr_factor = 1.0f / static_cast<float>(step + 1), .gradient_scale = 1.0f / 16});
    }
    engine.optimizer.verify_parameters({});
    return engine.values();
  });
  REQUIRE(all_same(parameters));
  return parameters.front();
}

}  // namespace

TEMPLATE_TEST_CASE("k ranks with two micro-batches leave the bits of 2k ranks with one", "[laws][law2][host]",
                   so::FlatSharding, so::PerParameterSharding, so::Replicated) {
  const int ranks = GENERATE(1, 2, 3, 4);
  CAPTURE(ranks);
  REQUIRE(trained<TestType>(ranks, 2, {}) == trained<TestType>(2 * ranks, 1, {}));
}

TEST_CASE("Policies and bucket sizes leave the same bits given the same gradients of each rank",
          "[laws][law2][host]") {
  const int world = GENERATE(1, 2, 3, 5, 8);
  const std::int64_t bytes = GENERATE(1, 1024, 6000, 1 << 20);
  CAPTURE(world, bytes);
  const auto expected = trained<so::FlatSharding>(world, 1, {});
  REQUIRE(trained<so::FlatSharding>(world, 1, {.bucket_bytes = bytes}) == expected);
  REQUIRE(trained<so::PerParameterSharding>(world, 1, {.bucket_bytes = bytes}) == expected);
  REQUIRE(trained<so::Replicated>(world, 1, {.bucket_bytes = bytes}) == expected);
}
