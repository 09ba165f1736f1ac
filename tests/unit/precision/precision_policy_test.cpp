// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_test_macros.hpp>
#include <shardopt/precision/mixed.hpp>
#include <shardopt/precision/precision_policy.hpp>
#include <support/small_engine.hpp>

#include <cstdint>
#include <type_traits>
#include <vector>

namespace engine_types {

/// An engine's own bfloat16.
struct Brain {
  std::uint16_t raw;
};

}  // namespace engine_types

template <>
struct shardopt::DtypeOf<engine_types::Brain> {
  static constexpr Dtype value = Dtype::bf16;
};

namespace {

using namespace test;

/// The least that models PrecisionPolicy, with an engine's own type.
struct Foreign {
  using Param = engine_types::Brain;
  using Grad = engine_types::Brain;
  using Master = float;
  static constexpr bool has_master = true;
};
static_assert(so::PrecisionPolicy<Foreign>);

struct WithoutGrad {
  using Param = float;
  using Master = float;
  static constexpr bool has_master = false;
};
static_assert(!so::PrecisionPolicy<WithoutGrad>);

struct OfUnknownType {
  using Param = short;
  using Grad = float;
  using Master = float;
  static constexpr bool has_master = true;
};
static_assert(!so::PrecisionPolicy<OfUnknownType>);

struct SaysNothingOfMasters {
  using Param = float;
  using Grad = float;
  using Master = float;
};
static_assert(!so::PrecisionPolicy<SaysNothingOfMasters>);

struct NotTriviallyCopyable : Foreign {
  std::vector<int> more;
};
static_assert(!so::PrecisionPolicy<NotTriviallyCopyable>);
static_assert(!so::PrecisionPolicy<float>);

static_assert(!so::FullPrecision::has_master);
static_assert(so::Mixed<so::bf16, float, float>::has_master);
static_assert(std::is_empty_v<so::Mixed<so::fp16, so::fp16, float>>);

}  // namespace

TEST_CASE("An engine's own 16-bit type trains as the library's does", "[precision][host]") {
  const auto train = [](auto precision) {
    using Precision = decltype(precision);
    return on_ranks(3, [](HostThreads comm) {
      const int rank = comm.rank();
      Engine<ThreadsOptimizer<so::AdamW, Precision>> engine(table_of_sizes({700, 5}), {}, std::move(comm),
                                                            1.0);
      for (int step = 0; step < 4; ++step) {
        engine.set_gradients(
            [&](std::int64_t i) { return static_cast<double>(noise(step, rank, i) % 100) / 64; });
        engine.step();
      }
      return engine.values();
    });
  };
  const auto foreign = train(Foreign{});
  CHECK(foreign == train(so::Mixed<so::bf16, so::bf16, float>{}));
  CHECK(foreign[0][0] != 1.0);
}

TEST_CASE("Buffers of the engine's own types of the same kind are taken by any policy", "[precision][host]") {
  const auto values = on_ranks(2, [](HostThreads comm) {
    std::vector<engine_types::Brain> parameters(300, {0x3f80});  // 1.0
    std::vector<engine_types::Brain> gradients(300, {0x3f80});
    ThreadsOptimizer<so::SGD, so::Mixed<so::bf16, so::bf16, float>> optimizer(
        table_of_sizes({300}), {.groups = {{"default", {.lr = 0.5}}}}, std::move(comm),
        so::FlatBuffers{parameters.data(), gradients.data()}, {});
    optimizer.step({.gradient_scale = 0.5f}, {});
    std::vector<std::uint16_t> bits;
    for (const auto p : parameters) bits.push_back(p.raw);
    return bits;
  });
  for (const auto& rank : values) CHECK(rank == std::vector<std::uint16_t>(300, 0x3f00));  // 0.5
}
