// SPDX-License-Identifier: Apache-2.0
// What users of such systems reported about norms and clipping.
#include <catch2/catch_approx.hpp>
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <shardopt/collectives/solo.hpp>
#include <support/small_engine.hpp>

#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <vector>

using namespace test;
using Catch::Approx;

namespace {

using Fp16 = so::Mixed<so::fp16, so::fp16, float>;
using Bf16 = so::Mixed<so::bf16, so::bf16, float>;

/// What a rank has after one step.
struct After {
  so::StepResult result;
  std::vector<double> values;
};

/// One SGD step with lr 1 from 0; the gradient of rank r at element i is f(r, i).
template <class Precision = so::FullPrecision, class Function>
std::vector<After> one_step(const so::ParameterTable& table, int world, float max_norm, const Function& f,
                            const so::StepOptions& options = {}, float clip_epsilon = 1e-6f) {
  return on_ranks(world, [&](HostThreads comm) {
    const int rank = comm.rank();
    typename ThreadsOptimizer<so::SGD, Precision>::Config config{
        .sharding = {.bucket_bytes = 1}, .max_norm = max_norm, .clip_epsilon = clip_epsilon};
    config.groups.clear();
    std::set<std::string> names;
    for (const auto& entry : table.entries()) {
      if (names.insert(entry.group).second) config.groups.push_back({entry.group, {.lr = 1}});
    }
    Engine<ThreadsOptimizer<so::SGD, Precision>> engine(table, config, std::move(comm));
    engine.set_gradients([&](std::int64_t i) { return f(rank, i); });
    const so::StepResult result = engine.step(options);
    return After{result, engine.values()};
  });
}

bool close(double a, double b, double tolerance) { return std::fabs(a - b) <= tolerance; }

}  // namespace

TEST_CASE("The norm is over all ranks' reduced slices and all groups, whatever foreign slices hold",
          "[reports][B037][host]") {
  const int world = GENERATE(1, 2, 3, 4);
  const bool groups = GENERATE(false, true);
  CAPTURE(world, groups);
  const auto table = packed_table({{"a", {2 * grain}, "A"}, {"b", {2 * grain}, groups ? "B" : "A"}});
  // The mean is 3 at the first element and 4 at the last; raw gradients are 1e6 elsewhere, and cancel.
  const auto after =
      one_step(table, world, 1,
               [&](int rank, std::int64_t i) {
                 const double mean = i == 0 ? 3 : i == 4 * grain - 1 ? 4 : 0;
                 const double cancelling = world == 1 ? 0 : rank == 0 ? 1e6 : rank == 1 ? -1e6 : 0;
                 return rank == 0 ? mean * world + cancelling : cancelling;
               },
               {.gradient_scale = 1.0f / static_cast<float>(world)});
  for (const After& rank : after) {
    CHECK(rank.result.norm == Approx(5).epsilon(1e-6));
    CHECK(rank.result.norm == after[0].result.norm);
    CHECK(close(rank.values.front(), -0.6, 1e-6));
    CHECK(close(rank.values.back(), -0.8, 1e-6));
    for (std::size_t i = 1; i + 1 < rank.values.size(); ++i) REQUIRE(rank.values[i] == 0);
  }
}

TEST_CASE("Squares and their sums do not happen in the gradients' type", "[reports][B040][host]") {
  for (const After& rank : one_step<Fp16>(table_of_sizes({4}), 2, 1, [](int, std::int64_t) { return 2500; }))
    CHECK(rank.result.norm == 10000);
  for (const After& rank : one_step<Fp16>(table_of_sizes({2 * grain}), 2, 1,
                                          [](int, std::int64_t i) { return i % grain < 2 ? 2500 : 0; })) {
    CHECK(rank.result.norm == 10000);
    CHECK_FALSE(rank.result.skipped);
  }
  // 257 elements a rank, in grains of their own.
  const auto table = table_of_sizes({257, 257, 257, 257});
  for (const After& rank : one_step<Bf16>(table, 4, 1, [](int, std::int64_t) { return 0.25; }))
    CHECK(rank.result.norm == Approx(32.06243908).epsilon(1e-9));
}

TEST_CASE("The norm of 2^25 ones does not stall", "[reports][B040][host]") {
  using Optimizer =
      so::ZeroOptimizer<so::SGD, so::FlatSharding, so::Solo<so::Host>, so::Mixed<so::bf16, float, float>>;
  constexpr std::int64_t size = std::int64_t{1} << 25;
  const std::vector<float> ones(static_cast<std::size_t>(size), 1.0f);
  std::vector<float> gradients = ones;
  std::vector<so::bf16> parameters(static_cast<std::size_t>(size));
  Optimizer optimizer(table_of_sizes({size}), {}, so::Solo<so::Host>{},
                      so::FlatBuffers{parameters.data(), gradients.data()}, {});
  const auto result = optimizer.reduce({}, {}).get();
  CHECK(result.norm == Approx(5792.6187515).epsilon(1e-10));
  optimizer.discard({});
}

TEST_CASE("Norms of zero, limits of zero and norms at the limit never make a NaN", "[reports][B042][host]") {
  struct Case {
    double scale;
    float max_norm;
    float epsilon;
    double expected;  ///< of the element whose gradient is 3·scale
  };
  const auto c = GENERATE(
      Case{0, 1, 1e-6f, 0},  // no gradient
      Case{0, 0, 1e-6f, 0},  // nor a limit
      Case{0, 0, 0, 0},      // nor an epsilon
      Case{1, 0, 1e-6f, 0},  // a limit of 0 makes every gradient 0
      Case{1, 5, 0, -3},     // at the limit: unchanged bits
      Case{1, 5, 1e-6f,
           -3 * static_cast<double>(
                    static_cast<float>(5 / (5 + static_cast<double>(1e-6f))))},  // the documented epsilon
      Case{0.99998, 5, 1e-6f,
           -static_cast<double>(static_cast<float>(3 * 0.99998))});  // below it: unchanged bits
  CAPTURE(c.scale, c.max_norm, c.epsilon);
  for (const After& rank : one_step(
           table_of_sizes({grain, grain}), 2, c.max_norm,
           [&](int r, std::int64_t i) {
             return r > 0 ? 0.0 : i == 0 ? 3 * c.scale : i == grain ? 4 * c.scale : 0.0;
           },
           {}, c.epsilon)) {
    CHECK(rank.values[0] == Approx(c.expected).epsilon(1e-7));
    if (c.epsilon == 0 || c.scale != 1) CHECK(rank.values[0] == c.expected);
    CHECK_FALSE(std::isnan(rank.result.norm));
    for (const double p : rank.values) REQUIRE(std::isfinite(p));
  }
}

TEST_CASE("Adam's moments stay finite when nothing comes in", "[reports][B042][host]") {
  const auto states = on_ranks(2, [](HostThreads comm) {
    Engine<ThreadsOptimizer<so::Adam>> engine(table_of_sizes({600}), {.max_norm = 0}, std::move(comm), 1.0);
    for (const double g : {0.0, 3.0, 0.0}) {
      engine.fill_gradients(g);
      engine.step();
    }
    auto all = engine.state("exp_avg");
    for (const float v : engine.state("exp_avg_sq")) all.push_back(v);
    for (const float p : engine.parameters) all.push_back(p - 1);
    return all;
  });
  for (const auto& rank : states) {
    for (const float value : rank) REQUIRE(value == 0.0f);
  }
}

TEST_CASE("A small clip factor keeps what its product with the gradient can hold", "[reports][B043][host]") {
  const auto fp16 = one_step<Fp16>(table_of_sizes({1}), 2, 1e-3f,
                                   [](int rank, std::int64_t) { return rank == 0 ? 60000 : 0; });
  const auto bf16 = one_step<Bf16>(table_of_sizes({1}), 2, 1e-3f,
                                   [](int rank, std::int64_t) { return rank == 0 ? 60000 : 0; });
  for (const auto& after : {fp16, bf16}) {
    for (const After& rank : after) {
      CHECK(rank.result.clip_factor == Approx(1e-3 / 60000).epsilon(2e-3));
      CHECK(rank.values[0] == Approx(-1e-3).epsilon(5e-3));  // what 16 bits hold of it
    }
  }
  const auto masters = [](auto precision) {
    return on_ranks(2, [](HostThreads comm) {
      Engine<ThreadsOptimizer<so::SGD, decltype(precision)>> engine(
          table_of_sizes({1}), {.groups = {{"default", {.lr = 1}}}, .max_norm = 1e-3f}, std::move(comm));
      engine.fill_gradients(30000);
      engine.step();
      return engine.state("master");
    });
  };
  CHECK(masters(Fp16{})[0].at(0) == Approx(-1e-3).epsilon(1e-3));
  CHECK(masters(Bf16{})[0].at(0) == Approx(-1e-3).epsilon(1e-3));
}

TEST_CASE("The gradient is unscaled before it is measured and clipped", "[reports][B044][host]") {
  const float scale = GENERATE(1.0f, 1024.0f, 65536.0f);
  CAPTURE(scale);
  for (const After& rank : one_step(table_of_sizes({grain, grain}), 2, 1,
                                    [&](int r, std::int64_t i) {
                                      return r == 0 && i == 0       ? 3.0 * static_cast<double>(scale)
                                             : r == 1 && i == grain ? 4.0 * static_cast<double>(scale)
                                                                    : 0.0;
                                    },
                                    {.gradient_scale = 1 / scale})) {
    CHECK(rank.result.norm == 5);
    CHECK(close(rank.values[0], -0.6, 1e-6));
    CHECK(close(rank.values[grain], -0.8, 1e-6));
  }
}

TEST_CASE("The sum of micro-batches is clipped, not each of them", "[reports][B044][host]") {
  const auto values = on_ranks(2, [](HostThreads comm) {
    const bool first = comm.rank() == 0;
    Engine<ThreadsOptimizer<so::SGD>> engine(
        table_of_sizes({2}), {.groups = {{"default", {.lr = 1}}}, .max_norm = 1}, std::move(comm));
    for (const float x : {3.0f, -3.0f}) {
      engine.gradients[0] += first ? x : 0.0f;
      engine.gradients[1] += first ? 4.0f : 0.0f;
    }
    engine.step();
    return engine.values();
  });
  for (const auto& rank : values) {
    CHECK(rank[0] == 0);
    CHECK(close(rank[1], -1, 1e-6));
  }
}

TEST_CASE("Twenty runs, other buckets and other worlds leave the same bits with clipping on",
          "[reports][B093][host]") {
  constexpr std::int64_t size = 100003;
  const auto table = table_of_sizes({size - 5003, 5003});
  struct Hash {
    std::uint64_t parameters = 0;
    double norm = 0;
    bool operator==(const Hash&) const = default;
  };
  // The sum over ranks is the same for every world: rank r holds the elements whose index has this remainder.
  const auto run = [&](int world, std::int64_t bucket_bytes) {
    const auto hashes = on_ranks(world, [&](HostThreads comm) {
      const int rank = comm.rank();
      Engine<ThreadsOptimizer<so::AdamW>> engine(
          table, {.sharding = {.bucket_bytes = bucket_bytes}, .max_norm = 1}, std::move(comm), 0.25);
      Hash hash;
      for (int step = 0; step < 2; ++step) {
        engine.set_gradients([&](std::int64_t i) {
          return i % world == rank ? static_cast<double>(noise(41, step, i) % 2000001) / 1e6 - 1 : 0.0;
        });
        hash.norm += engine.step().norm;
      }
      for (const float p : engine.parameters) hash.parameters = noise(hash.parameters, bits_of(p));
      return hash;
    });
    REQUIRE(all_same(hashes));
    return hashes[0];
  };
  const Hash expected = run(4, std::int64_t{32} << 20);
  for (int k = 0; k < 19; ++k) REQUIRE(run(4, std::int64_t{32} << 20) == expected);
  for (const std::int64_t bytes : {1000, 10000, 65536, 200000}) CHECK(run(4, bytes) == expected);
  for (const int world : {1, 2, 8}) CHECK(run(world, 30000) == expected);
}
