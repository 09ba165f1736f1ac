// SPDX-License-Identifier: Apache-2.0
#include "sharded_adamw.cuh"

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include <cstdlib>
#include <limits>

using namespace test;
using Catch::Matchers::ContainsSubstring;

namespace {

/// What each rank's call threw as an Exception.
template <class Exception, class Call>
std::vector<std::string> messages(int world, const Call& call) {
  std::vector<std::string> result(static_cast<std::size_t>(world));
  on_ranks(world, [&](int rank) {
    result[static_cast<std::size_t>(rank)] = message_of<Exception>([&] { call(rank); });
  });
  return result;
}

Sharded::Config with_lr(double lr) {
  Sharded::Config config = Rank::config();
  config.groups.front().rule.lr = lr;
  return config;
}

}  // namespace

TEST_CASE("What the constructor refuses has touched nothing of the engine's and keeps nothing",
          "[zero][cuda][law9]") {
  require_devices(1);
  const Communicators comms(1);
  const Rank engine;
  so::ParameterTable unknown_group = engine.table;
  unknown_group.add({.name = "other", .shape = {3}, .offset = 10000, .group = "nobody's"});
  Sharded::Config no_bucket = Rank::config();
  no_bucket.sharding.bucket_bytes = 0;
  Sharded::Config negative_norm = Rank::config();
  negative_norm.max_norm = -1.0f;
  const auto construct = [&](const so::ParameterTable& table, const Sharded::Config& config,
                             so::FlatBuffers<float, float> buffers) {
    const Sharded optimizer(table, config, so::Nccl::borrow(comms[0], engine.communication), buffers,
                            engine.compute);
  };
  const so::FlatBuffers<float, float> good = engine.buffers();
  auto* const odd = reinterpret_cast<float*>(reinterpret_cast<std::byte*>(good.parameters) + 2);
  const std::vector<float> parameters = engine.read_parameters();
  const std::vector<float> gradients = engine.gradients.read(engine.compute);
  cuda_calls::reset();

  using Wrong = std::invalid_argument;
  CHECK_THAT(message_of<Wrong>([&] {
               construct(engine.table, Rank::config(), {nullptr, good.gradients});
             }),
             ContainsSubstring("null"));
  CHECK_THAT(message_of<Wrong>([&] {
               construct(engine.table, Rank::config(), {odd, good.gradients});
             }),
             ContainsSubstring("parameters"));
  CHECK_THAT(message_of<Wrong>([&] { construct(unknown_group, Rank::config(), good); }),
             ContainsSubstring("nobody's"));
  CHECK_THAT(message_of<Wrong>([&] { construct(engine.table, with_lr(-1.0), good); }),
             ContainsSubstring("lr"));
  CHECK_THAT(message_of<Wrong>([&] { construct(engine.table, no_bucket, good); }),
             ContainsSubstring("bucket_bytes"));
  CHECK_THAT(message_of<Wrong>([&] { construct(engine.table, negative_norm, good); }),
             ContainsSubstring("max_norm"));
  // Only a message to the other ranks was sent.
  CHECK(cuda_calls::launches() == 0);
  CHECK(cuda_calls::count("cudaFree") == static_cast<std::int64_t>(cuda_calls::device_allocations().size()));
  CHECK(cuda_calls::pinned_allocations().empty());
  CHECK(engine.read_parameters() == parameters);
  CHECK(engine.gradients.read(engine.compute) == gradients);
}

TEST_CASE("What the constructor refuses on one GPU is told to the others", "[zero][cuda][law6][law9]") {
  require_devices(3);
  const Communicators comms(3);
  std::vector<std::string> texts(3);
  on_ranks(3, [&](int rank) {
    const Rank engine;
    const auto construct = [&] {
      static_cast<void>(engine.optimizer(with_lr(rank == 1 ? -1.0 : 0.01), comms[rank]));
    };
    texts[static_cast<std::size_t>(rank)] =
        rank == 1 ? message_of<std::invalid_argument>(construct) : message_of<so::CollectiveError>(construct);
  });
  for (const std::string& text : texts) CHECK_THAT(text, ContainsSubstring("lr"));
  CHECK_THAT(texts[0], ContainsSubstring("rank 1"));
  CHECK_THAT(texts[2], ContainsSubstring("rank 1"));
}

TEST_CASE("What a call refuses has enqueued nothing, and the next step is as if it had not been made",
          "[zero][cuda][law9]") {
  require_devices(2);
  const Communicators comms(2);
  std::vector<float> parameters[2][2];
  std::int64_t enqueued = -1;
  std::vector<std::string> texts;
  for (const bool disturbed : {false, true}) {
    Meeting meet(2);
    on_ranks(2, [&](int rank) {
      const Rank engine;
      const auto optimizer = engine.optimizer(comms[rank]);
      optimizer->gradient_ready(engine.ids[1], engine.compute);
      meet();
      if (rank == 0) cuda_calls::reset();
      meet();
      if (disturbed && rank == 0) {
        const auto refuse = [&](const auto& call) {
          texts.push_back(message_of<std::invalid_argument>(call));
        };
        const auto misplace = [&](const auto& call) { texts.push_back(message_of<std::logic_error>(call)); };
        constexpr float nan = std::numeric_limits<float>::quiet_NaN();
        refuse([&] { optimizer->gradient_ready(engine.ids[1], engine.compute); });
        refuse([&] { optimizer->gradient_ready(so::ParameterId{99}, engine.compute); });
        refuse([&] { optimizer->step({.lr_factor = nan}, engine.compute); });
        refuse([&] { optimizer->step({.gradient_scale = nan}, engine.compute); });
        refuse([&] { optimizer->reduce({.lr_factor = nan}, engine.compute); });
        refuse([&] { optimizer->wait_parameters(so::ParameterId{99}, engine.compute); });
        refuse([&] { optimizer->set_rule("default", {.lr = -1.0}, engine.compute); });
        refuse([&] { optimizer->set_rule("nobody's", {}, engine.compute); });
        misplace([&] { optimizer->apply({}, engine.compute); });
        misplace([&] { optimizer->discard(engine.compute); });
        enqueued = cuda_calls::enqueued();
      }
      meet();
      static_cast<void>(optimizer->step({}, engine.compute));
      optimizer->wait_parameters(engine.compute);
      parameters[disturbed ? 1 : 0][rank] = engine.read_parameters();
    });
  }
  CHECK(enqueued == 0);
  for (const std::string& text : texts) {
    CAPTURE(text);
    CHECK(text.substr(0, 9) == "shardopt:");
  }
  CHECK(parameters[0][0] == parameters[1][0]);
  CHECK(parameters[0][1] == parameters[1][1]);
  CHECK(parameters[0][0] == parameters[0][1]);
}

TEST_CASE("GPUs that are set up differently all get an error that names the first difference",
          "[zero][cuda][law6]") {
  const int world = GENERATE(2, 4);
  require_devices(world);
  const Communicators comms(world);
  const auto check = [&](const auto& change, const char* text) {
    const auto all = messages<so::CollectiveError>(world, [&](int rank) {
      Rank engine;
      Sharded::Config config = Rank::config();
      if (rank == world - 1) change(engine, config);
      static_cast<void>(engine.optimizer(config, comms[rank]));
    });
    for (const std::string& message : all) {
      CHECK_THAT(message, ContainsSubstring(text));
      CHECK_THAT(message, ContainsSubstring("rank " + std::to_string(world - 1)));
    }
  };
  check([](Rank&, Sharded::Config& c) { c.groups[0].rule.lr = 0.02; }, "group 'default'");
  check([](Rank&, Sharded::Config& c) { c.max_norm = 3.0f; }, "max_norm");
  check([](Rank&, Sharded::Config& c) { c.sharding.bucket_bytes = 1 << 20; }, "bucket");
  check([](Rank&, Sharded::Config& c) { c.reduction = so::Reduction::ordered; }, "reduction");
  check([](Rank&, Sharded::Config& c) { c.initial_parameters = so::InitialParameters::trust; },
        "initial_parameters");
  check([](Rank& e, Sharded::Config&) { e.table.add({.name = "more", .shape = {0}, .offset = 0}); },
        "parameter 3");
  // The communicator is as good as before.
  CHECK_NOTHROW(on_ranks(world, [&](int rank) {
    const Rank engine;
    const auto optimizer = engine.optimizer(comms[rank]);
    static_cast<void>(optimizer->step({}, engine.compute).get());
  }));
}

TEST_CASE("GPUs that begin with other parameters get an error, or rank 0's", "[zero][cuda][law6]") {
  require_devices(3);
  const Communicators comms(3);
  const auto start = [&](so::InitialParameters how, int rank) {
    const Rank engine;
    if (rank == 1) engine.fill(engine.parameters, 0.25f);
    Sharded::Config config = Rank::config();
    config.initial_parameters = how;
    const auto optimizer = engine.optimizer(config, comms[rank]);
    optimizer->verify_parameters(engine.compute);
    return engine.read_parameters();
  };
  for (const std::string& text : messages<so::CollectiveError>(
           3, [&](int rank) { static_cast<void>(start(so::InitialParameters::verify, rank)); })) {
    CHECK_THAT(text, ContainsSubstring("'p0'"));
  }
  for (const std::string& text : messages<so::CollectiveError>(
           3, [&](int rank) { static_cast<void>(start(so::InitialParameters::trust, rank)); })) {
    CHECK_THAT(text, ContainsSubstring("'p0'"));
  }
  std::vector<std::vector<float>> all(3);
  on_ranks(3, [&](int rank) {
    all[static_cast<std::size_t>(rank)] = start(so::InitialParameters::broadcast, rank);
  });
  // All but the gap, which is nobody's.
  for (std::size_t k = 0; k < all[0].size(); ++k) {
    const float expected = 0.5f * static_cast<float>(1 + k % 5);
    const bool gap = k >= 700 && k < 703;
    for (const auto& rank : all) CHECK((gap || rank[k] == expected));
  }
  CHECK(all[1][701] == 0.25f * 2.0f);
}

TEST_CASE("Hyper-parameters that drift apart show in the ticket of every GPU", "[zero][cuda][law6]") {
  require_devices(2);
  const Communicators comms(2);
  std::vector<so::StepResult> results[2];
  on_ranks(2, [&](int rank) {
    const Rank engine;
    const auto optimizer = engine.optimizer(comms[rank]);
    const auto take = [&](const so::StepOptions& options) {
      results[rank].push_back(optimizer->step(options, engine.compute).get());
    };
    take({.lr_factor = 0.5f});
    take({.lr_factor = rank == 0 ? 0.5f : 0.25f});
    optimizer->set_rule("default", {.lr = rank == 0 ? 0.1 : 0.2}, engine.compute);
    take({});
    optimizer->set_rule("default", {.lr = 0.1}, engine.compute);
    take({});
  });
  for (const auto& rank : results) {
    CHECK_FALSE(rank[0].inputs_differ);
    CHECK(rank[1].inputs_differ);
    CHECK(rank[2].inputs_differ);
    CHECK_FALSE(rank[3].inputs_differ);
  }
}

TEST_CASE("A collective that fails in a step breaks the optimizer of each GPU cleanly",
          "[zero][cuda][law9]") {
  require_devices(2);
  const Communicators comms(2);
  struct Failing {
    const char* call;
    const char* position;
    bool before_the_update;
  };
  const Failing failing = GENERATE(Failing{"ncclReduceScatter", "reduction of bucket 2", true},
                                   Failing{"ncclAllReduce", "all-reduce of the norm", true},
                                   Failing{"ncclAllGather", "gather of bucket 0", false});
  CAPTURE(failing.call);
  std::vector<std::string> texts[2];
  std::vector<float> before[2];
  std::vector<float> after[2];
  Meeting meet(2);
  on_ranks(2, [&](int rank) {
    const Rank engine;
    const auto optimizer = engine.optimizer(comms[rank]);
    static_cast<void>(optimizer->step({}, engine.compute));
    optimizer->wait_parameters(engine.compute);
    before[rank] = engine.read_parameters();
    meet();
    if (rank == 0) cuda_calls::reset();
    if (rank == 0) cuda_calls::fail(failing.call, 0, ncclSystemError);
    meet();
    texts[rank].push_back(message_of<so::NcclError>([&] { optimizer->step({}, engine.compute); }));
    meet();
    if (rank == 0) cuda_calls::reset();
    meet();
    const auto again = [&](const auto& call) { texts[rank].push_back(message_of<so::NcclError>(call)); };
    again([&] { optimizer->step({}, engine.compute); });
    again([&] { optimizer->gradient_ready(engine.ids[0], engine.compute); });
    again([&] { optimizer->wait_parameters(engine.compute); });
    again([&] { optimizer->zero_gradients(engine.compute); });
    again([&] { optimizer->verify_parameters(engine.compute); });
    engine.communication.synchronize();
    after[rank] = engine.read_parameters();
  });
  for (int rank = 0; rank < 2; ++rank) {
    CHECK_THAT(texts[rank][0], ContainsSubstring(failing.call));
    CHECK_THAT(texts[rank][0], ContainsSubstring("rank " + std::to_string(rank)));
    CHECK_THAT(texts[rank][0], ContainsSubstring("iteration 2"));
    CHECK_THAT(texts[rank][0], ContainsSubstring(failing.position));
    CHECK_THAT(texts[rank][0], ContainsSubstring("broken"));
    for (const std::string& text : texts[rank]) CHECK(text == texts[rank][0]);
    if (failing.before_the_update) CHECK(after[rank] == before[rank]);
  }
}

TEST_CASE("A launch that fails in a step breaks the optimizer cleanly", "[zero][cuda][law9]") {
  require_devices(1);
  const Communicators comms(1);
  const Rank engine;
  const auto optimizer = engine.optimizer(comms[0]);
  const std::vector<float> before = engine.read_parameters();
  const auto [call, status, n] =
      GENERATE(table<const char*, int, int>({{"cudaLaunchKernelExC", cudaErrorInvalidConfiguration, 1},
                                             {"cudaLaunchKernelExC", cudaErrorInvalidConfiguration, 3},
                                             {"cudaEventRecord", cudaErrorUnknown, 1},
                                             {"cudaStreamWaitEvent", cudaErrorUnknown, 1}}));
  CAPTURE(call, n);
  cuda_calls::reset();
  cuda_calls::fail(call, n, status);
  const std::string text = message_of<so::CudaError>([&] { optimizer->step({}, engine.compute); });
  cuda_calls::reset();
  CHECK_THAT(text, ContainsSubstring(std::string(call).substr(0, 16)));
  CHECK_THAT(text, ContainsSubstring("iteration 1"));
  CHECK(message_of<so::CudaError>([&] { optimizer->step({}, engine.compute); }) == text);
  CHECK(cuda_calls::enqueued() == 0);
  CHECK(engine.read_parameters() == before);
}

TEST_CASE("A ticket that outlives its optimizer says so", "[zero][cuda]") {
  require_devices(1);
  const Communicators comms(1);
  const Rank engine;
  auto optimizer = engine.optimizer(comms[0]);
  const so::StepTicket first = optimizer->step({}, engine.compute);
  CHECK(first.get().iteration == 1);
  for (int step = 0; step < 63; ++step) static_cast<void>(optimizer->step({}, engine.compute));
  CHECK(first.get().iteration == 1);
  static_cast<void>(optimizer->step({}, engine.compute));
  CHECK_THAT(message_of<so::Error>([&] { static_cast<void>(first.get()); }), ContainsSubstring("too old"));
  const so::StepTicket last = optimizer->step({}, engine.compute);
  optimizer.reset();
  CHECK_THAT(message_of<so::Error>([&] { static_cast<void>(last.get()); }), ContainsSubstring("gone"));
}

// Run with failures that the launcher brings about.
TEST_CASE("Collectives that the launcher lets fail break the optimizer cleanly", "[.][faults]") {
  require_devices(2);
  const Communicators comms(2);
  std::vector<std::string> texts[2];
  on_ranks(2, [&](int rank) {
    const Rank engine;
    const auto optimizer = engine.optimizer(comms[rank]);
    texts[rank].push_back(message_of<so::NcclError>([&] { optimizer->step({}, engine.compute); }));
    texts[rank].push_back(message_of<so::NcclError>([&] { optimizer->step({}, engine.compute); }));
  });
  if (texts[0][0].empty()) SKIP("nothing heeds SHARDOPT_TEST_FAULTS");
  for (int rank = 0; rank < 2; ++rank) {
    CHECK_THAT(texts[rank][0], ContainsSubstring("ncclReduceScatter"));
    CHECK_THAT(texts[rank][0], ContainsSubstring("rank " + std::to_string(rank) + ", iteration 1"));
    CHECK_THAT(texts[rank][0], ContainsSubstring("bucket"));
    CHECK(texts[rank][1] == texts[rank][0]);
  }
}
