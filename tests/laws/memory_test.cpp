// SPDX-License-Identifier: Apache-2.0
// Law 4: the plan is what is allocated, byte for byte. (That nothing is written outside a given arena is part
// of the sharded tests: they guard it.)
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <laws/counted_new.hpp>
#include <shardopt/collectives/solo.hpp>
#include <support/foreign_policies.hpp>
#include <support/guarded_memory.hpp>
#include <support/host_world.hpp>
#include <support/small_engine.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

using namespace test;

namespace {

template <class R, class S, class P>
struct Combo {
  using Rule = R;
  using Optimizer = ThreadsOptimizer<R, P, S>;
};
using Combos = std::tuple<Combo<so::AdamW, so::FlatSharding, so::FullPrecision>,
                          Combo<so::SGD, so::PerParameterSharding, so::Mixed<so::bf16, so::bf16, float>>,
                          Combo<so::AdamAmsgrad, so::Replicated, so::Mixed<so::fp16, float, float>>,
                          Combo<SignRule, ScatterSharding, so::Mixed<so::bf16, float, float>>>;

class Told : public so::Observer {
 public:
  void before_allocation(const so::MemoryPlan& plan) override {
    before.push_back(plan.device_bytes + plan.pinned_bytes);
  }
  void after_allocation(const so::MemoryPlan& plan) override {
    after.push_back(plan.device_bytes + plan.pinned_bytes);
  }
  std::vector<std::int64_t> before;
  std::vector<std::int64_t> after;
};

std::int64_t whole(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }

/// What a rank found.
struct Found {
  std::int64_t planned = 0;
  std::int64_t allocated = 0;
  std::int64_t allocated_by_plan = 0;
  std::int64_t allocated_by_steps = 0;
  std::int64_t sum_of_parts = 0;
  std::int64_t told = 0;
  std::size_t tellings = 0;
};

}  // namespace

TEMPLATE_LIST_TEST_CASE("What is allocated is what was planned, byte for byte, and steps allocate nothing",
                        "[laws][law4][host]", Combos) {
  using Optimizer = typename TestType::Optimizer;
  const int world = GENERATE(1, 2, 3, 8);
  const bool scattered = GENERATE(false, true);
  CAPTURE(world, scattered);
  so::ParameterTable table;
  std::int64_t offset = 0;
  for (const std::int64_t size : {300, 0, 5000, 1, 2048}) {
    table.add({.name = "p" + std::to_string(table.size()),
               .shape = {size},
               .offset = offset,
               .group = table.size() % 2 == 0 ? "a" : "b"});
    offset += size + (scattered ? 3 : 0);
  }
  const auto found = on_ranks(world, [&](HostThreads comm) {
    Told told;
    typename Optimizer::Config config;
    config.groups = {{"a", {}}, {"b", {}}};
    config.observer = &told;
    if constexpr (requires { config.sharding.bucket_bytes; }) config.sharding.bucket_bytes = 9000;
    Found result;
    const std::int64_t at_first = allocations().aligned_bytes;
    const so::MemoryPlan plan = Optimizer::plan(table, config, {.rank = comm.rank(), .world = world});
    result.planned = plan.device_bytes + plan.pinned_bytes;
    result.allocated_by_plan = allocations().aligned_bytes - at_first;
    // The parts of control_bytes are rounded up one by one.
    result.sum_of_parts = plan.control_bytes + whole(plan.map_bytes) + whole(plan.staging_bytes) +
                          whole(plan.workspace_bytes) + plan.pinned_bytes;
    for (const auto& buffer : plan.buffers) result.sum_of_parts += whole(buffer.bytes);
    std::int64_t before = allocations().aligned_bytes;
    Engine<Optimizer> engine(table, config, std::move(comm));
    result.allocated = allocations().aligned_bytes - before;
    before = allocations().aligned_bytes;
    for (int k = 0; k < 3; ++k) {
      engine.fill_gradients(k);
      engine.step();
    }
    engine.optimizer.zero_gradients({});
    engine.optimizer.verify_parameters({});
    result.allocated_by_steps = allocations().aligned_bytes - before;
    if (told.before == told.after && !told.before.empty()) result.told = told.before.front();
    result.tellings = told.before.size();
    return result;
  });
  for (const Found& rank : found) {
    CHECK(rank.planned > 0);
    CHECK(rank.allocated == rank.planned);
    CHECK(rank.sum_of_parts == rank.planned);
    CHECK(rank.told == rank.planned);
    CHECK(rank.tellings == 1);
    CHECK(rank.allocated_by_plan == 0);
    CHECK(rank.allocated_by_steps == 0);
  }
}

TEMPLATE_LIST_TEST_CASE("An optimizer that is handed an arena of the planned size allocates nothing",
                        "[laws][law4][host]", Combos) {
  using Optimizer = typename TestType::Optimizer;
  using Param = typename Optimizer::Param;
  using Grad = typename Optimizer::Grad;
  const int world = GENERATE(1, 3);
  const bool adopted = GENERATE(false, true);
  CAPTURE(world, adopted);
  const auto table = table_of_sizes({300, 0, 5000, 1, 2048});
  const auto size = static_cast<std::size_t>(extent_of(table));
  const auto verdicts = on_ranks(world, [&](HostThreads comm) -> std::string {
    const typename Optimizer::Config config;
    const so::MemoryPlan plan =
        Optimizer::plan(table, config, {.rank = comm.rank(), .world = world}, adopted);
    GuardedMemory<HostMemory> device(plan.device_bytes, {});
    GuardedMemory<HostMemory> pinned(plan.pinned_bytes, {});
    std::vector<Param> parameters(size, rounded<Param>(1.0));
    std::vector<Grad> gradients(size, rounded<Grad>(0.5));
    std::vector<std::vector<float>> states;
    typename Optimizer::Memory memory = so::Arena{device.data(), pinned.data()};
    if (adopted) {
      so::StateBuffers buffers;
      for (const auto& buffer : plan.buffers) {
        states.emplace_back(static_cast<std::size_t>(plan.owned_parameters) + 1);
        buffers.buffers.emplace_back(buffer.name, states.back().data());
      }
      buffers.scratch = {device.data(), pinned.data()};
      memory = buffers;
    }
    const std::int64_t before = allocations().aligned_calls;
    {
      Optimizer optimizer(table, config, std::move(comm),
                          so::FlatBuffers{parameters.data(), gradients.data()}, memory, {});
      for (int k = 0; k < 3; ++k) {
        if (optimizer.step({}, {}).get().updates != k + 1) return "a step was not made";
      }
      optimizer.zero_gradients({});
    }
    if (allocations().aligned_calls != before) return "something was allocated";
    if (!device.guards_intact() || !pinned.guards_intact()) return "something was written outside the arena";
    return "";
  });
  for (const std::string& verdict : verdicts) CHECK(verdict == "");
}

TEST_CASE("What a step takes of the host's memory does not grow with the gradients it checks",
          "[laws][law4][B049][host]") {
  using Optimizer =
      so::ZeroOptimizer<so::SGD, so::FlatSharding, so::Solo<so::Host>, so::Mixed<so::fp16, so::fp16, float>>;
  const auto taken = [](std::int64_t size) {
    Engine<Optimizer> engine(table_of_sizes({size}), {.max_norm = 1}, so::Solo<so::Host>{});
    engine.fill_gradients(0.5);
    const AllocationCounts before = allocations();
    const auto result = engine.step();
    const AllocationCounts& after = allocations();
    CHECK(result.norm == 0.5 * std::sqrt(static_cast<double>(size)));
    return after.plain_bytes - before.plain_bytes + after.aligned_bytes - before.aligned_bytes;
  };
  CHECK(taken(1 << 20) == taken(1 << 10));
  CHECK(taken(1 << 20) < 16384);
}

TEST_CASE("An arena that is null or not aligned is refused before anything is written",
          "[laws][law4][law9][host]") {
  using Optimizer = ThreadsOptimizer<so::AdamW>;
  const auto table = table_of_sizes({300});
  const auto plan = Optimizer::plan(table, {}, {});
  GuardedMemory<HostMemory> device(plan.device_bytes + 256, {});
  GuardedMemory<HostMemory> pinned(plan.pinned_bytes, {});
  std::vector<float> values(600, 1.0f);
  const auto refusal = [&](so::Arena arena) {
    return on_ranks(1, [&](HostThreads comm) {
      return message_of<std::invalid_argument>([&] {
        Optimizer optimizer(table, {}, std::move(comm), so::FlatBuffers{values.data(), values.data() + 300},
                            arena, {});
      });
    })[0];
  };
  CHECK(refusal({nullptr, pinned.data()}).find("null") != std::string::npos);
  CHECK(refusal({device.data(), nullptr}).find("null") != std::string::npos);
  CHECK(refusal({device.data() + 4, pinned.data()}).find("Arena.device must be aligned to 256") !=
        std::string::npos);
  CHECK(refusal({device.data(), pinned.data() + 64}).find("Arena.pinned must be aligned to 256") !=
        std::string::npos);
  CHECK(std::all_of(device.data(), device.data() + device.bytes(), [](std::byte b) { return b == poison; }));
  CHECK(values == std::vector<float>(600, 1.0f));
}
