// SPDX-License-Identifier: Apache-2.0
#include "sharded_adamw.cuh"

#include <support/captured_graph.hpp>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include <algorithm>
#include <array>

using namespace test;

namespace {

/// A gradient that differs by rank and step.
std::vector<float> gradient_of(const Rank& engine, int rank, int step) {
  std::vector<float> values(engine.gradients.size());
  for (std::size_t k = 0; k < values.size(); ++k) {
    values[k] = 0.01f *
                static_cast<float>(static_cast<int>(k * 7 + static_cast<std::size_t>(step) * 3) % 23 - 11) *
                static_cast<float>(rank + 1);
  }
  return values;
}

/// What 4 steps make of the parameters when one stream does all, on each of `world` GPUs.
std::vector<float> serial_run(int world, int steps) {
  std::vector<float> result;
  const Communicators comms(world);
  on_ranks(world, [&](int rank) {
    const Rank engine;
    const auto optimizer = engine.optimizer(comms[rank]);
    for (int step = 0; step < steps; ++step) {
      engine.gradients.write(gradient_of(engine, rank, step), engine.compute);
      static_cast<void>(optimizer->step({}, engine.compute));
    }
    optimizer->wait_parameters(engine.compute);
    const auto parameters = engine.read_parameters();
    if (rank == 0) result = parameters;
  });
  return result;
}

/// Waits a while on the device, so that what is not ordered behind it comes too early. (A simulated device
/// has no clock that would matter.)
__global__ void dawdle(std::int64_t cycles) {
  const std::int64_t start = clock64();
  for (int turn = 0; turn < 1000 && clock64() - start < cycles; ++turn) __nanosleep(2000);
}

__global__ void copy_slowly(float* to, const float* from, std::int64_t count, std::int64_t cycles) {
  const std::int64_t start = clock64();
  for (int turn = 0; turn < 1000 && clock64() - start < cycles; ++turn) __nanosleep(2000);
  for (std::int64_t k = threadIdx.x; k < count; k += blockDim.x) to[k] = from[k];
}

}  // namespace

TEST_CASE("Gradients may come from several streams, parameters go to another", "[zero][cuda][B075]") {
  require_devices(2);
  constexpr int steps = 4;
  const std::vector<float> expected = serial_run(2, steps);
  const Communicators comms(2);
  std::vector<float> got[2];
  on_ranks(2, [&](int rank) {
    const Rank engine;
    const auto optimizer = engine.optimizer(comms[rank]);
    const OwnStream producers[3];
    const OwnStream consumer;
    const OwnMemory<float> fresh(engine.gradients.size());
    const OwnMemory<float> seen(engine.parameters.size());
    for (int step = 0; step < steps; ++step) {
      fresh.write(gradient_of(engine, rank, step), consumer);
      consumer.synchronize();
      for (std::size_t k = 0; k < engine.ids.size(); ++k) {
        const auto& entry = engine.table[engine.ids[k]];
        copy_slowly<<<1, 256, 0, producers[k]>>>(engine.gradients.data() + entry.offset,
                                                 fresh.data() + entry.offset, entry.numel, 50000 << (2 * k));
        optimizer->gradient_ready(engine.ids[k], producers[k]);
      }
      static_cast<void>(optimizer->step({}, engine.compute));
      // The next step's gradients must not overtake this one's reduction: producers go on behind the step.
      cudaEvent_t stepped = nullptr;
      succeed(cudaEventCreateWithFlags(&stepped, cudaEventDisableTiming));
      succeed(cudaEventRecord(stepped, engine.compute));
      for (const OwnStream& producer : producers) succeed(cudaStreamWaitEvent(producer, stepped, 0));
      succeed(cudaStreamWaitEvent(consumer, stepped, 0));
      succeed(cudaEventDestroy(stepped));
    }
    for (const so::ParameterId id : engine.ids) {
      const auto& entry = engine.table[id];
      optimizer->wait_parameters(id, consumer);
      succeed(cudaMemcpyAsync(seen.data() + entry.offset, engine.parameters.data() + entry.offset,
                              static_cast<std::size_t>(entry.numel) * sizeof(float), cudaMemcpyDeviceToDevice,
                              consumer));
    }
    got[rank] = seen.read(consumer);
  });
  for (const auto& parameters : got) {
    REQUIRE(parameters.size() == expected.size());
    for (std::size_t k = 0; k < expected.size(); ++k) {
      if (k < 700 || k >= 703) CHECK(parameters[k] == expected[k]);
    }
  }
}

TEST_CASE("What makes the host wait is seen", "[zero][cuda]") {
  require_devices(1);
  const OwnStream stream;
  const OwnMemory<float> device(4);
  const OwnMemory<float> pinned(4, true);
  std::vector<float> pageable(4);
  cudaEvent_t event = nullptr;
  succeed(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  const auto waits_of = [](const auto& call) {
    cuda_calls::reset();
    call();
    return cuda_calls::waits();
  };
  const auto copy = [&](void* to, const void* from) {
    return waits_of([&] { succeed(cudaMemcpyAsync(to, from, device.bytes(), cudaMemcpyDefault, stream)); });
  };
  CHECK(copy(device.data(), pinned.data()) == 0);
  CHECK(copy(pinned.data(), device.data()) == 0);
  CHECK(copy(device.data(), pageable.data()) == 1);
  CHECK(copy(pageable.data(), device.data()) == 1);
  CHECK(waits_of([&] { succeed(cudaEventRecord(event, stream)); }) == 0);
  CHECK(waits_of([&] { succeed(cudaStreamWaitEvent(stream, event, 0)); }) == 0);
  CHECK(waits_of([&] { static_cast<void>(cudaEventQuery(event)); }) == 1);
  CHECK(waits_of([&] { static_cast<void>(cudaStreamQuery(stream)); }) == 1);
  static_cast<void>(cudaGetLastError());
  CHECK(waits_of([&] { succeed(cudaEventSynchronize(event)); }) == 1);
  CHECK(waits_of([&] { stream.synchronize(); }) == 1);
  succeed(cudaEventDestroy(event));
}

TEST_CASE("No call but construction and the ticket waits for the device", "[zero][cuda]") {
  require_devices(2);
  const so::Reduction reduction = GENERATE(so::Reduction::native, so::Reduction::ordered);
  CAPTURE(so::name_of(reduction));
  const Communicators comms(2);
  std::string waiting;  // what waited, by the calls of both ranks
  std::int64_t asked = 0;
  Meeting meet(2);
  on_ranks(2, [&](int rank) {
    const Rank engine;
    const OwnStream other;
    const OwnMemory<float> values(2);  // a scale, a scalar
    values.write({0.5f, 0.5f}, engine.compute);
    Sharded::Config config = Rank::config();
    config.reduction = reduction;
    const auto optimizer = engine.optimizer(config, comms[rank]);
    const so::StepOptions options{.gradient_scale = static_cast<const float*>(values.data()),
                                  .scalars = {values.data() + 1}};
    const auto watch = [&](const std::string& name, const auto& call) {
      meet();
      if (rank == 0) cuda_calls::reset();
      meet();
      call();
      meet();
      if (rank == 0 && cuda_calls::waits() != 0) waiting += name + "; ";
    };
    const auto enqueue_step = [&](const so::StepOptions& with) {
      watch("gradient_ready", [&] { optimizer->gradient_ready(engine.ids, engine.compute); });
      watch("step", [&] { static_cast<void>(optimizer->step(with, engine.compute)); });
      watch("wait_parameters", [&] { optimizer->wait_parameters(engine.ids, engine.compute); });
      watch("zero_gradients", [&] { optimizer->zero_gradients(engine.compute); });
      watch("reduce", [&] { static_cast<void>(optimizer->reduce(with, engine.compute)); });
      watch("apply", [&] { static_cast<void>(optimizer->apply({}, engine.compute)); });
      watch("reduce", [&] { static_cast<void>(optimizer->reduce(with, engine.compute)); });
      watch("discard", [&] { static_cast<void>(optimizer->discard(engine.compute)); });
    };
    so::StepTicket ticket = optimizer->last_result(engine.compute);
    for (int step = 0; step < 3; ++step) {
      enqueue_step(options);
      watch("wait_parameters elsewhere", [&] { optimizer->wait_parameters(other); });
      watch("set_inputs", [&] { optimizer->set_inputs(0.5f, 0.25f, engine.compute); });
      watch("set_inputs", [&] { optimizer->set_inputs(0.5f, values.data(), engine.compute); });
      watch("last_result", [&] { ticket = optimizer->last_result(engine.compute); });
      watch("set_rule", [&] { optimizer->set_rule("default", {.lr = 0.02}, engine.compute); });
      watch("refresh_masters", [&] { optimizer->refresh_masters(engine.compute); });
      watch("restore_parameters", [&] { optimizer->restore_parameters(engine.compute); });
    }
    optimizer->wait_parameters(engine.compute);
    const CapturedGraph graph(engine.compute, [&] { enqueue_step({.scalars = options.scalars}); });
    for (int replay = 0; replay < 2; ++replay) {
      watch("set_inputs before a replay",
            [&] { optimizer->set_inputs(0.5f, values.data(), engine.compute); });
      graph.replay(engine.compute);
      watch("last_result of a replay", [&] { ticket = optimizer->last_result(engine.compute); });
    }
    meet();
    if (rank == 0) cuda_calls::reset();
    meet();
    static_cast<void>(ticket.get());
    meet();
    if (rank == 0) asked = cuda_calls::waits();
    meet();
  });
  CHECK(waiting == "");
  CHECK(asked == 2);  // each rank once
}

TEST_CASE("An optimizer may go right after a step", "[zero][cuda][B077]") {
  require_devices(2);
  const std::vector<float> expected = serial_run(2, 1);
  const Communicators comms(2);
  std::vector<float> got[2];
  on_ranks(2, [&](int rank) {
    const Rank engine;
    engine.gradients.write(gradient_of(engine, rank, 0), engine.compute);
    auto optimizer = engine.optimizer(comms[rank]);
    dawdle<<<1, 1, 0, engine.compute>>>(100000);
    static_cast<void>(optimizer->step({}, engine.compute));
    optimizer.reset();
    got[rank] = engine.read_parameters();
  });
  CHECK(got[0] == expected);
  CHECK(got[1] == expected);
}

TEST_CASE("Two optimizers share a communicator, and the engine uses it between their calls", "[zero][cuda]") {
  require_devices(3);
  constexpr int steps = 3;
  const std::vector<float> expected = serial_run(3, steps);
  const Communicators comms(3);
  std::vector<float> got[3][2];
  std::array<float, 3> sums{};
  on_ranks(3, [&](int rank) {
    const Rank first;
    const Rank second;
    // Both on the stream of the first: what one communicator does stands in one order.
    const auto a = first.optimizer(comms[rank]);
    const Sharded b(second.table, Rank::config(), so::Nccl::borrow(comms[rank], first.communication),
                    second.buffers(), second.compute);
    Sharded& other = const_cast<Sharded&>(b);
    const OwnMemory<float> loss(1);
    loss.write({1.0f}, first.communication);
    const auto engines_own = [&] {
      succeed(
          ncclAllReduce(loss.data(), loss.data(), 1, ncclFloat32, ncclSum, comms[rank], first.communication));
    };
    for (int step = 0; step < steps; ++step) {
      const auto gradient = gradient_of(first, rank, step);
      first.gradients.write(gradient, first.compute);
      second.gradients.write(gradient, second.compute);
      a->gradient_ready(first.ids[2], first.compute);
      if (step == 0) engines_own();
      other.gradient_ready(second.ids[2], second.compute);
      static_cast<void>(a->step({}, first.compute));
      if (step == 1) engines_own();
      static_cast<void>(other.step({}, second.compute));
    }
    a->wait_parameters(first.compute);
    other.wait_parameters(second.compute);
    got[rank][0] = first.read_parameters();
    got[rank][1] = second.read_parameters();
    sums[static_cast<std::size_t>(rank)] = loss.read(first.communication).front();
  });
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(got[rank][0] == expected);
    CHECK(got[rank][1] == expected);
    CHECK(sums[static_cast<std::size_t>(rank)] == 9.0f);
  }
}

TEST_CASE("A communicator of the optimizer's own works like a borrowed one", "[zero][cuda]") {
  require_devices(2);
  const std::vector<float> expected = serial_run(2, 2);
  ncclUniqueId id{};
  succeed(ncclGetUniqueId(&id));
  std::vector<float> got[2];
  on_ranks(2, [&](int rank) {
    const Rank engine;
    Sharded optimizer(engine.table, Rank::config(), so::Nccl::create(id, rank, 2, engine.communication),
                      engine.buffers(), engine.compute);
    for (int step = 0; step < 2; ++step) {
      engine.gradients.write(gradient_of(engine, rank, step), engine.compute);
      static_cast<void>(optimizer.step({}, engine.compute));
    }
    optimizer.wait_parameters(engine.compute);
    got[rank] = engine.read_parameters();
  });
  CHECK(got[0] == expected);
  CHECK(got[1] == expected);
}

TEST_CASE("The current device and the last error of a thread stay as they were", "[zero][cuda]") {
  // Each rank's thread has another GPU current than the one it works on.
  require_devices(2);
  const std::vector<float> expected = serial_run(2, 2);
  const Communicators comms(2);
  std::vector<float> got[2];
  std::array<std::string, 2> faults;
  on_ranks(2, [&](int rank) {
    const Rank engine;
    std::string& fault = faults[static_cast<std::size_t>(rank)];
    engine.compute.synchronize();
    succeed(cudaSetDevice(1 - rank));
    static_cast<void>(
        cudaMemcpy(nullptr, nullptr, 1, static_cast<cudaMemcpyKind>(99)));  // the engine's own mistake
    const cudaError_t pending = cudaPeekAtLastError();
    if (pending == cudaSuccess) fault += " no error to leave alone";
    const auto leaves = [&](const char* call) {
      int device = -1;
      succeed(cudaGetDevice(&device));
      if (device != 1 - rank) fault += std::string(" device after ") + call;
      if (cudaPeekAtLastError() != pending) fault += std::string(" error after ") + call;
      if (device != 1 - rank) succeed(cudaSetDevice(1 - rank));
    };
    auto optimizer = engine.optimizer(comms[rank]);
    leaves("the constructor");
    for (int step = 0; step < 2; ++step) {
      engine.gradients.write(gradient_of(engine, rank, step), engine.compute);
      optimizer->gradient_ready(engine.ids[2], engine.compute);
      leaves("gradient_ready");
      const so::StepTicket ticket = optimizer->step({}, engine.compute);
      leaves("step");
      static_cast<void>(ticket.get());
      leaves("get");
    }
    optimizer->wait_parameters(engine.compute);
    leaves("wait_parameters");
    got[rank] = engine.read_parameters();
    optimizer->zero_gradients(engine.compute);
    leaves("zero_gradients");
    optimizer.reset();
    leaves("the destructor");
    static_cast<void>(cudaGetLastError());
    succeed(cudaSetDevice(rank));
  });
  CHECK(faults[0] == "");
  CHECK(faults[1] == "");
  CHECK(got[0] == expected);
  CHECK(got[1] == expected);
}

TEST_CASE("A gradient scale may lie in device memory", "[zero][cuda]") {
  require_devices(2);
  const Communicators comms(2);
  std::vector<float> got[2];
  for (const bool on_device : {false, true}) {
    on_ranks(2, [&](int rank) {
      const Rank engine;
      const OwnMemory<float> scale(1);
      const auto optimizer = engine.optimizer(comms[rank]);
      for (int step = 0; step < 2; ++step) {
        const float value = step == 0 ? 0.25f : 0.125f;
        engine.gradients.write(gradient_of(engine, rank, step), engine.compute);
        so::StepOptions options{.gradient_scale = value};
        if (on_device) {
          scale.write({value}, engine.compute);
          options.gradient_scale = static_cast<const float*>(scale.data());
        }
        static_cast<void>(optimizer->step(options, engine.compute));
      }
      optimizer->wait_parameters(engine.compute);
      const auto parameters = engine.read_parameters();
      if (rank == 0) got[on_device ? 1 : 0] = parameters;
    });
  }
  CHECK(got[0] == got[1]);
}

TEST_CASE("Gradients are zeroed behind the step, gaps keep their bits", "[zero][cuda][law5]") {
  require_devices(1);
  const Communicators comms(1);
  const Rank engine;
  const auto optimizer = engine.optimizer(comms[0]);
  const OwnStream other;
  static_cast<void>(optimizer->step({}, engine.compute));
  optimizer->zero_gradients(other);
  const std::vector<float> gradients = engine.gradients.read(other);
  for (std::size_t k = 0; k < gradients.size(); ++k) {
    const bool gap = k >= 700 && k < 703;
    CHECK(gradients[k] == (gap ? static_cast<float>(1 + k % 5) : 0.0f));
  }
}

TEST_CASE("Kernels are launched a bucket, never a parameter", "[zero][cuda]") {
  require_devices(2);
  const Communicators comms(2);
  // 2048 elements, four buckets, in 3 and in 64 parameters.
  std::vector<std::int64_t> few{1000, 24, 1024};
  std::vector<std::int64_t> many(64, 32);
  std::vector<std::int64_t> launches;
  std::vector<std::int64_t> collectives;
  for (const auto& sizes : {few, many}) {
    Meeting meet(2);
    on_ranks(2, [&](int rank) {
      Rank engine(sizes);
      const auto optimizer = engine.optimizer(comms[rank]);
      meet();
      if (rank == 0) cuda_calls::reset();
      meet();
      static_cast<void>(optimizer->step({}, engine.compute));
      meet();
      if (rank == 0) {
        launches.push_back(cuda_calls::launches());
        for (const char* call : {"ncclReduceScatter", "ncclAllGather", "ncclAllReduce", "ncclReduce",
                                 "ncclBroadcast", "ncclSend"}) {
          collectives.push_back(cuda_calls::count(call));
        }
      }
      meet();
    });
  }
  // A bucket: squares, update. A step: the digest, the norm, the decision. The bucket with a gap in it is
  // packed and unpacked for gradients and for parameters.
  CHECK(launches.front() == 2 * (4 * 2 + 3 + 4));
  CHECK(launches.back() == launches.front());
  CHECK(collectives[0] == 2 * 4);
  CHECK(collectives[1] == 2 * 4);
  CHECK(collectives[2] == 2);
  CHECK(collectives[3] + collectives[4] + collectives[5] == 0);
}
