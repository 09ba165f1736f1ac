// SPDX-License-Identifier: Apache-2.0
#include <shardopt/cuda.cuh>

#include <support/captured_graph.hpp>
#include <support/cuda_ranks.hpp>
#include <support/message_of.hpp>
#include <support/require_devices.hpp>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using namespace test;
namespace so = shardopt;
using namespace std::chrono_literals;

namespace {

using Optimizer = so::ZeroOptimizer<so::SGD, so::FlatSharding, so::Nccl, so::FullPrecision>;

constexpr int world = 2;
constexpr std::size_t elements = 1500;  // three buckets

/// What an engine destroys. `compute`: the stream that steps and replays were put on.
enum class Item { graph, optimizer, ticket, compute, communication, communicator, memory };
constexpr const char* names[] = {"graph",         "optimizer",    "ticket", "compute stream",
                                 "communication", "communicator", "memory"};
using Order = std::vector<Item>;

/// Whose the communicator is, and whether a thread watches it.
enum class Kind { borrowed, borrowed_watched, own, own_watched };
bool is_own(Kind kind) { return kind == Kind::own || kind == Kind::own_watched; }

/// Whether it is documented: graphs go before the optimizer, which goes before what it works on.
bool is_permitted(const Order& order) {
  const auto place = [&](Item item) { return std::find(order.begin(), order.end(), item); };
  const auto optimizer = place(Item::optimizer);
  return place(Item::graph) < optimizer && optimizer < place(Item::communication) &&
         optimizer < place(Item::communicator) && optimizer < place(Item::memory);
}

/// An optimizer's own communicator goes with it.
std::vector<Order> permitted_orders(Kind kind) {
  Order order{Item::graph,         Item::optimizer,    Item::ticket, Item::compute,
              Item::communication, Item::communicator, Item::memory};
  if (is_own(kind)) order.erase(std::find(order.begin(), order.end(), Item::communicator));
  std::vector<Order> result;
  do {
    if (is_permitted(order)) result.push_back(order);
  } while (std::next_permutation(order.begin(), order.end()));
  return result;
}

std::string text_of(const Order& order) {
  std::string text;
  for (const Item item : order) text += std::string(text.empty() ? "" : ", ") + names[static_cast<int>(item)];
  return text;
}

/// Ends the process where something lasts longer than 5 s: a hang has no other end.
class Watchdog {
 public:
  explicit Watchdog(std::string what) : what_(std::move(what)), thread_([this] { watch(); }) {}
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

 private:
  void watch() {
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, 5s, [&] { return done_; })) return;
    std::fprintf(stderr, "not ended within 5 s: %s\n", what_.c_str());
    std::_Exit(1);
  }

  std::string what_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::thread thread_;
};

/// A stream that goes without being waited for.
class BareStream {
 public:
  BareStream() { succeed(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  BareStream(const BareStream&) = delete;
  BareStream& operator=(const BareStream&) = delete;
  ~BareStream() { static_cast<void>(cudaStreamDestroy(stream_)); }
  operator cudaStream_t() const noexcept { return stream_; }  // NOLINT: stands for it

 private:
  cudaStream_t stream_ = nullptr;
};

/// One rank's engine, each part of which can go by itself.
class Engine {
 public:
  /// @param arena  whether the optimizer allocates nothing, so that nothing but itself waits when it goes
  Engine(Kind kind, bool arena, const ncclUniqueId& id, int rank) {
    parameters_->fill(0, *compute_);
    so::ParameterTable table;
    table.add({.name = "a", .shape = {static_cast<std::int64_t>(elements)}, .offset = 0});
    const Optimizer::Config config{.groups = {{"default", {.lr = 1}}}, .sharding = {.bucket_bytes = 2048}};
    const so::MemoryPlan plan = Optimizer::plan(table, config, {.rank = rank, .world = world});
    Optimizer::Memory memory;
    if (arena) {
      device_.emplace(static_cast<std::size_t>(plan.device_bytes));
      pinned_.emplace(static_cast<std::size_t>(plan.pinned_bytes), true);
      memory = so::Arena{device_->data(), pinned_->data()};
    }
    const so::NcclOptions options{
        .deadline = kind == Kind::borrowed_watched || kind == Kind::own_watched ? 20000ms : 0ms};
    if (!is_own(kind)) succeed(ncclCommInitRank(&communicator_, world, id, rank));
    optimizer_.emplace(table, config,
                       is_own(kind) ? so::Nccl::create(id, rank, world, *communication_, options)
                                    : so::Nccl::borrow(communicator_, *communication_, options),
                       so::FlatBuffers{parameters_->data(), gradients_->data()}, memory, *compute_);
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine() {  // what is left after a failure
    ticket_.reset();
    graph_.reset();
    optimizer_.reset();
    if (communicator_ != nullptr) static_cast<void>(ncclCommDestroy(communicator_));
  }

  /// Two replays, which are waited for, and a step that is not, nor what follows it on the engine's stream.
  void work() {
    graph_.emplace(*compute_, [&] { static_cast<void>(optimizer_->step({}, *compute_)); });
    for (int replay = 0; replay < 2; ++replay) {
      write_gradients();
      graph_->replay(*compute_);
    }
    succeed(cudaStreamSynchronize(*compute_));
    write_gradients();
    ticket_.emplace(optimizer_->step({}, *compute_));
    optimizer_->zero_gradients(*compute_);
  }

  /// @return what is wrong, or nothing
  std::string destroy(Item item) {
    switch (item) {
      case Item::graph:
        graph_.reset();
        break;
      case Item::optimizer:
        optimizer_.reset();
        break;
      case Item::ticket: {
        const bool is_told = optimizer_ || message_of<so::Error>([&] {
                                             static_cast<void>(ticket_->get());
                                           }).find("is gone") != std::string::npos;
        ticket_.reset();
        return is_told ? "" : "a ticket does not say that its optimizer is gone";
      }
      case Item::compute:
        compute_.reset();
        break;
      case Item::communication:
        communication_.reset();
        break;
      case Item::communicator:
        succeed(ncclCommDestroy(std::exchange(communicator_, nullptr)));
        break;
      case Item::memory: {
        const OwnStream other;  // the optimizer has waited for all that it enqueued
        const bool is_done = parameters_->read(other) == std::vector<float>(elements, -3.0f) &&
                             gradients_->read(other) == std::vector<float>(elements, 0.0f);
        parameters_.reset();
        gradients_.reset();
        device_.reset();
        pinned_.reset();
        return is_done ? "" : "what was enqueued was not taken along";
      }
    }
    return "";
  }

 private:
  void write_gradients() { gradients_->write(std::vector<float>(elements, 0.5f), *compute_); }

  std::optional<BareStream> compute_{std::in_place};
  std::optional<BareStream> communication_{std::in_place};
  std::optional<OwnMemory<float>> parameters_{elements};
  std::optional<OwnMemory<float>> gradients_{elements};
  std::optional<OwnMemory<std::byte>> device_;
  std::optional<OwnMemory<std::byte>> pinned_;
  ncclComm_t communicator_ = nullptr;
  std::optional<Optimizer> optimizer_;
  std::optional<CapturedGraph> graph_;
  std::optional<so::StepTicket> ticket_;
};

/// Sets up, works and destroys in this order. @return what went wrong, or nothing
std::string take_down(Kind kind, bool arena, const Order& order) {
  ncclUniqueId id{};
  succeed(ncclGetUniqueId(&id));
  std::vector<std::string> faults(world);
  on_ranks(world, [&](int rank) {
    Engine engine(kind, arena, id, rank);
    engine.work();
    const Watchdog watchdog(text_of(order) + ", rank " + std::to_string(rank));
    for (const Item item : order) faults[static_cast<std::size_t>(rank)] += engine.destroy(item);
    if (cudaGetLastError() != cudaSuccess)
      faults[static_cast<std::size_t>(rank)] += " an error is left behind";
  });
  return faults[0] + faults[1];
}

/// Every `stride`-th permitted order.
void take_down_in_orders(std::size_t stride) {
  const Kind kind = GENERATE(Kind::borrowed, Kind::borrowed_watched, Kind::own, Kind::own_watched);
  const bool arena = GENERATE(false, true);
  CAPTURE(static_cast<int>(kind), arena);
  require_devices(world);
  const std::vector<Order> orders = permitted_orders(kind);
  REQUIRE(orders.size() == (is_own(kind) ? 60U : 252U));
  for (std::size_t k = 0; k < orders.size(); k += stride) {
    CAPTURE(text_of(orders[k]));
    CHECK(take_down(kind, arena, orders[k]) == "");
  }
}

}  // namespace

TEST_CASE("An engine goes in orders that are documented, each within 5 s", "[zero][cuda][B078]") {
  take_down_in_orders(13);
}

TEST_CASE("An engine goes in every order that is documented, each within 5 s", "[zero][cuda][B078][full]") {
  take_down_in_orders(1);
}
