// SPDX-License-Identifier: Apache-2.0
#include "sharded_adamw.cuh"

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include <algorithm>

using namespace test;

namespace {

/// Is told of allocations.
class Listener final : public so::Observer {
 public:
  void before_allocation(const so::MemoryPlan& plan) override { before.push_back(plan.device_bytes); }
  void after_allocation(const so::MemoryPlan& plan) override { after.push_back(plan.device_bytes); }
  std::vector<std::int64_t> before;
  std::vector<std::int64_t> after;
};

/// Bytes that CUDA was asked for while `world` ranks lived, against what was planned.
struct Account {
  std::vector<std::int64_t> device;
  std::vector<std::int64_t> pinned;
  std::vector<std::int64_t> planned_device;
  std::vector<std::int64_t> planned_pinned;
  std::int64_t others = 0;
  std::int64_t frees = 0;
  std::int64_t pinned_frees = 0;
};

template <class Give>
Account account(int world, bool adopted, const Give& give) {
  Account result;
  const Communicators comms(world);
  Meeting meet(world);
  std::mutex mutex;
  on_ranks(world, [&](int rank) {
    const Rank engine;
    const so::MemoryPlan plan = Sharded::plan(engine.table, Rank::config(), {rank, world}, adopted);
    const auto given = give(plan);
    engine.compute.synchronize();
    meet();
    if (rank == 0) cuda_calls::reset();
    meet();
    {
      const auto optimizer = engine.optimizer(comms[rank], given.memory);
      for (int step = 0; step < 3; ++step) static_cast<void>(optimizer->step({}, engine.compute));
    }
    meet();
    if (rank == 0) {
      result.device = cuda_calls::device_allocations();
      result.pinned = cuda_calls::pinned_allocations();
      result.others = cuda_calls::other_allocations();
      result.frees = cuda_calls::count("cudaFree");
      result.pinned_frees = cuda_calls::count("cudaFreeHost");
    }
    meet();
    const std::lock_guard lock(mutex);
    result.planned_device.push_back(plan.device_bytes);
    result.planned_pinned.push_back(plan.pinned_bytes);
  });
  for (auto* list : {&result.device, &result.pinned, &result.planned_device, &result.planned_pinned}) {
    std::sort(list->begin(), list->end());
  }
  return result;
}

/// What an engine keeps while the optimizer lives.
struct Given {
  Sharded::Memory memory;
  std::vector<std::unique_ptr<OwnMemory<std::byte>>> kept;
};

}  // namespace

TEST_CASE("An optimizer asks CUDA for the planned bytes, once, and gives them back", "[zero][cuda][law4]") {
  const int world = GENERATE(1, 3);
  require_devices(world);
  const Account a = account(world, false, [](const so::MemoryPlan&) { return Given{}; });
  CHECK(a.device == a.planned_device);
  CHECK(a.pinned == a.planned_pinned);
  CHECK(a.others == 0);
  CHECK(a.frees == world);
  CHECK(a.pinned_frees == world);
}

TEST_CASE("An optimizer with an arena of the planned size allocates nothing", "[zero][cuda][law4]") {
  require_devices(2);
  const Account a = account(2, false, [](const so::MemoryPlan& plan) {
    Given given;
    given.kept.push_back(std::make_unique<OwnMemory<std::byte>>(static_cast<std::size_t>(plan.device_bytes)));
    given.kept.push_back(
        std::make_unique<OwnMemory<std::byte>>(static_cast<std::size_t>(plan.pinned_bytes), true));
    given.memory = so::Arena{given.kept[0]->data(), given.kept[1]->data()};
    return given;
  });
  CHECK(a.device.empty());
  CHECK(a.pinned.empty());
  CHECK(a.others == 0);
  CHECK(a.frees == 0);
  CHECK(a.pinned_frees == 0);
}

TEST_CASE("An optimizer that adopts state buffers asks for what remains", "[zero][cuda][law4]") {
  require_devices(2);
  const Account a = account(2, true, [](const so::MemoryPlan& plan) {
    Given given;
    so::StateBuffers states;
    for (const auto& buffer : plan.buffers) {
      given.kept.push_back(std::make_unique<OwnMemory<std::byte>>(static_cast<std::size_t>(buffer.bytes)));
      states.buffers.emplace_back(buffer.name, reinterpret_cast<float*>(given.kept.back()->data()));
    }
    given.memory = states;
    return given;
  });
  CHECK(a.device == a.planned_device);
  CHECK(a.pinned == a.planned_pinned);
  const so::ParameterTable table = Rank().table;
  const auto all = Sharded::plan(table, Rank::config(), {0, 2});
  const auto rest = Sharded::plan(table, Rank::config(), {0, 2}, true);
  CHECK(rest.device_bytes < all.device_bytes - all.state_bytes + 512);
}

TEST_CASE("The observer hears of an allocation before and after it", "[zero][cuda][law4]") {
  require_devices(1);
  const Communicators comms(1);
  const Rank engine;
  Listener listener;
  Sharded::Config config = Rank::config();
  config.observer = &listener;
  const auto optimizer = engine.optimizer(config, comms[0]);
  CHECK(listener.before == std::vector<std::int64_t>{optimizer->memory_plan().device_bytes});
  CHECK(listener.after == listener.before);
}

TEST_CASE("A failed allocation is a CudaError, and nothing stays behind", "[zero][cuda][law9]") {
  require_devices(1);
  const Communicators comms(1);
  const Rank engine;
  for (const char* call : {"cudaMalloc", "cudaHostAlloc"}) {
    CAPTURE(call);
    engine.compute.synchronize();
    cuda_calls::reset();
    cuda_calls::fail(call, 1, cudaErrorMemoryAllocation);
    const std::string text =
        message_of<so::CudaError>([&] { static_cast<void>(engine.optimizer(comms[0])); });
    CHECK(text.find(call) != std::string::npos);
    CHECK(text.find("cudaErrorMemoryAllocation") != std::string::npos);
    CHECK(cuda_calls::launches() == 0);
  }
  CHECK_NOTHROW(engine.optimizer(comms[0]));
}

TEST_CASE("An arena that is null or not aligned is refused before anything is launched",
          "[zero][cuda][law9]") {
  require_devices(1);
  const Communicators comms(1);
  const Rank engine;
  const so::MemoryPlan plan = Sharded::plan(engine.table, Rank::config(), {0, 1});
  const OwnMemory<std::byte> device(static_cast<std::size_t>(plan.device_bytes + 256));
  const OwnMemory<std::byte> pinned(static_cast<std::size_t>(plan.pinned_bytes + 256), true);
  engine.compute.synchronize();
  cuda_calls::reset();
  CHECK_THROWS_AS(engine.optimizer(comms[0], so::Arena{device.data(), nullptr}), std::invalid_argument);
  CHECK_THROWS_AS(engine.optimizer(comms[0], so::Arena{nullptr, pinned.data()}), std::invalid_argument);
  CHECK_THROWS_AS(engine.optimizer(comms[0], so::Arena{device.data() + 64, pinned.data()}),
                  std::invalid_argument);
  CHECK_THROWS_AS(engine.optimizer(comms[0], so::Arena{device.data(), pinned.data() + 8}),
                  std::invalid_argument);
  CHECK(cuda_calls::launches() == 0);
  CHECK(cuda_calls::pinned_allocations().empty());
  CHECK(cuda_calls::count("cudaFree") == static_cast<std::int64_t>(cuda_calls::device_allocations().size()));
}
