// SPDX-License-Identifier: Apache-2.0
#include <shardopt/cuda.cuh>

#include <support/captured_graph.hpp>
#include <support/cuda_ranks.hpp>
#include <support/message_of.hpp>
#include <support/require_devices.hpp>

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include <memory>
#include <string>
#include <vector>

namespace so = shardopt;
using namespace test;
using Catch::Matchers::ContainsSubstring;

namespace {

constexpr std::size_t elements = 1500;  // three buckets

using Optimizer = so::ZeroOptimizer<so::SGD, so::FlatSharding, so::Nccl, so::FullPrecision>;

so::ParameterTable make_table() {
  so::ParameterTable table;
  table.add({.name = "a", .shape = {static_cast<std::int64_t>(elements)}, .offset = 0});
  return table;
}

/// A rank's buffers, and an optimizer that can go before they do.
struct Rank {
  explicit Rank(ncclComm_t comm, const so::ParameterTable& table = make_table()) {
    parameters.fill(0, stream);
    gradients.fill(0, stream);
    optimizer = std::make_unique<Optimizer>(
        table, Optimizer::Config{.groups = {{"default", {.lr = 1}}}, .sharding = {.bucket_bytes = 2048}},
        so::Nccl::borrow(comm, communication), so::FlatBuffers{parameters.data(), gradients.data()}, stream);
  }

  OwnStream stream;
  OwnStream other;
  OwnStream communication;
  OwnMemory<float> parameters{elements};
  OwnMemory<float> gradients{elements};
  std::unique_ptr<Optimizer> optimizer;
};

}  // namespace

TEST_CASE("An optimizer may go when its replays are done, and takes the rest of its work along",
          "[zero][cuda][B077]") {
  require_devices(2);
  const Communicators comms(2);
  std::vector<std::vector<float>> got(2);
  on_ranks(2, [&](int rank) {
    Rank engine(comms[rank]);
    Optimizer& optimizer = *engine.optimizer;
    static_cast<void>(optimizer.step({}, engine.other));
    optimizer.wait_parameters(engine.stream);
    {
      const CapturedGraph graph(engine.stream, [&] { static_cast<void>(optimizer.step({}, engine.stream)); });
      engine.gradients.write(std::vector<float>(elements, 0.5f), engine.stream);
      optimizer.set_inputs(0.5f, 1.0f, engine.stream);
      graph.replay(engine.stream);
      engine.stream.synchronize();
    }
    static_cast<void>(optimizer.reduce({}, engine.stream));  // and is left so
    engine.optimizer.reset();
    got[static_cast<std::size_t>(rank)] = engine.parameters.read(engine.stream);
  });
  for (const auto& parameters : got) CHECK((parameters == std::vector<float>(elements, -0.5f)));
}

TEST_CASE("Hyper-parameters that drift apart show in replays, too", "[zero][cuda][law6]") {
  require_devices(2);
  const Communicators comms(2);
  std::vector<std::string> differ(2);
  on_ranks(2, [&](int rank) {
    Rank engine(comms[rank]);
    Optimizer& optimizer = *engine.optimizer;
    const CapturedGraph graph(engine.stream, [&] { static_cast<void>(optimizer.step({}, engine.stream)); });
    const auto replay = [&] {
      graph.replay(engine.stream);
      differ[static_cast<std::size_t>(rank)] +=
          optimizer.last_result(engine.stream).get().inputs_differ ? "1" : "0";
    };
    replay();
    optimizer.set_rule("default", {.lr = rank == 0 ? 0.5 : 0.25}, engine.stream);
    replay();
    optimizer.set_rule("default", {.lr = 0.25}, engine.stream);
    replay();
    optimizer.set_inputs(rank == 0 ? 0.5f : 0.25f, 1.0f, engine.stream);
    replay();
    optimizer.set_inputs(0.5f, 1.0f, engine.stream);
    replay();
  });
  for (const std::string& shown : differ) CHECK(shown == "01010");
}

TEST_CASE("A captured step in two halves gives the bits of a whole one", "[zero][cuda]") {
  require_devices(1);
  const Communicators comms(1);
  const Rank engine(comms[0]);
  Optimizer& optimizer = *engine.optimizer;
  const CapturedGraph graph(engine.stream, [&] {
    static_cast<void>(optimizer.reduce({}, engine.stream));
    static_cast<void>(optimizer.apply({}, engine.stream));
  });
  for (int step = 0; step < 3; ++step) {
    engine.gradients.write(std::vector<float>(elements, 0.5f), engine.stream);
    optimizer.set_inputs(0.5f, 0.5f, engine.stream);
    graph.replay(engine.stream);
  }
  CHECK(optimizer.last_result(engine.stream).get().iteration == 3);
  CHECK(optimizer.counters(engine.other).updates == 3);
  CHECK((engine.parameters.read(engine.stream) == std::vector<float>(elements, -0.375f)));
}

TEST_CASE("A step without a parameter can be captured", "[zero][cuda]") {
  require_devices(1);
  const Communicators comms(1);
  const Rank engine(comms[0], so::ParameterTable{});
  const CapturedGraph graph(engine.stream,
                            [&] { static_cast<void>(engine.optimizer->step({}, engine.stream)); });
  for (int step = 0; step < 3; ++step) graph.replay(engine.stream);
  CHECK(engine.optimizer->last_result(engine.stream).get().iteration == 3);
}

TEST_CASE("What a capture cannot hold is refused, and the capture goes on", "[zero][cuda][law9]") {
  require_devices(1);
  const Communicators comms(1);
  const Rank engine(comms[0]);
  Optimizer& optimizer = *engine.optimizer;
  CHECK(optimizer.last_result(engine.stream).get().iteration == 0);
  static_cast<void>(optimizer.step({}, engine.stream));
  std::vector<std::string> texts;
  const CapturedGraph graph(engine.stream, [&] {
    const auto refuse = [&](const auto& call) { texts.push_back(message_of<std::logic_error>(call)); };
    refuse([&] { static_cast<void>(optimizer.last_result(engine.stream)); });
    refuse([&] { static_cast<void>(optimizer.counters(engine.stream)); });
    refuse([&] { optimizer.set_rule("default", {}, engine.stream); });
    refuse([&] { optimizer.verify_parameters(engine.stream); });
    refuse([&] { optimizer.wait_parameters(engine.stream); });
    static_cast<void>(optimizer.step({}, engine.stream));
    optimizer.wait_parameters(engine.stream);
  });
  for (const std::string& text : texts) CHECK_THAT(text, ContainsSubstring("capture"));
  optimizer.wait_parameters(engine.stream);
  graph.replay(engine.stream);
  CHECK(optimizer.last_result(engine.stream).get().iteration == 2);
}

TEST_CASE("GPUs that meet on the host refuse a capture before anything is enqueued", "[zero][cuda][law9]") {
  require_devices(1);
  using Threaded = so::ZeroOptimizer<so::SGD, so::FlatSharding, so::Threads<so::Cuda>, so::FullPrecision>;
  std::string step;
  std::string announcement;
  std::int64_t iteration = 0;
  so::Threads<so::Cuda>::run(1, [&](so::Threads<so::Cuda> comm) {
    const OwnStream stream;
    const OwnMemory<float> parameters(elements);
    const OwnMemory<float> gradients(elements);
    parameters.fill(0, stream);
    gradients.fill(0, stream);
    Threaded optimizer(make_table(), {}, std::move(comm),
                       so::FlatBuffers{parameters.data(), gradients.data()}, stream);
    const CapturedGraph graph(stream, [&] {
      step = message_of<std::logic_error>([&] { static_cast<void>(optimizer.step({}, stream)); });
      announcement =
          message_of<std::logic_error>([&] { optimizer.gradient_ready(so::ParameterId{0}, stream); });
    });
    iteration = optimizer.step({}, stream).get().iteration;
  });
  CHECK_THAT(step, ContainsSubstring("threads cannot be captured"));
  CHECK_THAT(announcement, ContainsSubstring("threads cannot be captured"));
  CHECK(iteration == 1);
}
