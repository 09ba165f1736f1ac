// SPDX-License-Identifier: Apache-2.0
#include <shardopt/checkpoint.hpp>
#include <shardopt/cuda.cuh>
#include <support/cuda_ranks.hpp>
#include <support/require_devices.hpp>
#include <support/scratch_files.hpp>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace so = shardopt;
namespace checkpoint = so::checkpoint;
using namespace test;

namespace {

using Precision = so::Mixed<so::bf16, float, float>;
using OnHost = so::ZeroOptimizer<so::AdamW, so::PerParameterSharding, so::Threads<so::Host>, Precision>;

constexpr std::size_t elements = 6000;
constexpr int world = 2;

so::ParameterTable make_table() {
  so::ParameterTable table;
  table.add({.name = "a", .shape = {1000, 3}, .offset = 5, .group = "decay"});
  table.add({.name = "b", .shape = {77}, .offset = 3011, .group = "plain"});
  table.add({.name = "none", .shape = {0}, .offset = 3100, .group = "plain"});
  table.add({.name = "c", .shape = {2049}, .offset = 3500, .group = "decay"});
  return table;
}

template <class Optimizer>
typename Optimizer::Config make_config() {
  typename Optimizer::Config config{
      .groups = {{"decay", {.lr = 1e-2, .weight_decay = 0.1}}, {"plain", {.lr = 3e-2}}},
      .reduction = so::Reduction::ordered,
      .max_norm = 1.0f};
  config.sharding.bucket_bytes = 8000;
  return config;
}

std::vector<float> gradients_of(int rank, int step) {
  std::vector<float> result(elements);
  for (std::size_t i = 0; i < elements; ++i)
    result[i] = std::sin(static_cast<float>(static_cast<int>(i) * 3 + rank * 17 + step * 29));
  return result;
}

/// Bits of all states of an optimizer; on rank 0.
template <class Optimizer>
std::vector<float> states_of(Optimizer& optimizer, typename Optimizer::Stream stream) {
  std::vector<float> states;
  for (const auto& full : optimizer.gather_state(0, stream))
    states.insert(states.end(), full.values.begin(), full.values.end());
  return states;
}

/// Runs body(optimizer, stream, step) as one rank, whose GPU is current, and gives what it returns.
template <class Comm, class Body>
std::vector<float> as_rank(Comm comm, const Body& body) {
  using Optimizer = so::ZeroOptimizer<so::AdamW, so::FlatSharding, Comm, Precision>;
  const int rank = comm.rank();
  const int device = comm.device().ordinal();
  const OwnStream stream;
  const OwnMemory<so::bf16> parameters(elements);
  const OwnMemory<float> gradients(elements);
  parameters.fill(0, stream);
  Optimizer optimizer(make_table(), make_config<Optimizer>(), std::move(comm),
                      so::FlatBuffers{parameters.data(), gradients.data()}, stream);
  const auto step = [&](int first, int last) {
    for (int k = first; k < last; ++k) {
      const std::vector<float> values = gradients_of(rank, k);
      gradients.write(values, stream);
      optimizer.step({.lr_factor = 1.0f / static_cast<float>(k + 1)}, stream);
      stream.synchronize();  // the values go
    }
  };
  std::vector<float> mine = body(optimizer, static_cast<cudaStream_t>(stream), step);
  int current = -1;
  succeed(cudaGetDevice(&current));
  if (current != device) throw std::runtime_error("the current device has changed");
  return mine;
}

/// On two GPUs; gives what rank 0's returned.
template <class Body>
std::vector<float> with_gpus(const Body& body) {
  const Communicators comms(world);
  std::vector<float> result;
  on_ranks(world, [&](int rank) {
    const OwnStream comm_stream;
    const std::vector<float> mine = as_rank(so::Nccl::borrow(comms[rank], comm_stream), body);
    if (rank == 0) result = mine;
  });
  return result;
}

/// The same on threads, rank r's on GPU `devices[r]`.
template <class Body>
std::vector<float> with_threads(const std::vector<int>& devices, const Body& body) {
  std::vector<so::ThreadSeat> seats;
  for (const int device : devices) seats.push_back({.device = device});
  std::vector<float> result;
  so::Threads<so::Cuda>::run(seats, [&](so::Threads<so::Cuda> comm) {
    const int rank = comm.rank();
    const std::vector<float> mine = as_rank(std::move(comm), body);
    if (rank == 0) result = mine;
  });
  return result;
}

/// The same on two threads of the host.
template <class Body>
std::vector<float> with_host(const Body& body) {
  std::vector<float> result;
  so::Threads<so::Host>::run(world, [&](so::Threads<so::Host> comm) {
    const int rank = comm.rank();
    std::vector<so::bf16> parameters(elements);
    std::vector<float> gradients(elements);
    OnHost optimizer(make_table(), make_config<OnHost>(), std::move(comm),
                     so::FlatBuffers{parameters.data(), gradients.data()}, {});
    const auto step = [&](int first, int last) {
      for (int k = first; k < last; ++k) {
        const std::vector<float> values = gradients_of(rank, k);
        std::copy(values.begin(), values.end(), gradients.begin());
        optimizer.step({.lr_factor = 1.0f / static_cast<float>(k + 1)}, {});
      }
    };
    const std::vector<float> mine = body(optimizer, so::Host::Stream{}, step);
    if (rank == 0) result = mine;
  });
  return result;
}

/// What on_devices(body) saved goes on on the host, and what the host saved on devices, with the bits of a
/// run without a break.
template <class OnDevices>
void exchange_with_host(const OnDevices& on_devices) {
  const ScratchFolder folder;
  QuickFiles files;
  const auto unbroken = with_host([&](auto& optimizer, auto stream, const auto& step) {
    step(0, 6);
    return states_of(optimizer, stream);
  });
  REQUIRE(unbroken.size() == 3 * (3000 + 77 + 2049));
  const auto saving = [&](const std::string& name) {
    return [&, name](auto& optimizer, auto stream, const auto& step) {
      step(0, 3);
      checkpoint::save(optimizer, folder / name, {.files = &files}, stream);
      step(3, 6);
      optimizer.verify_parameters(stream);
      return states_of(optimizer, stream);
    };
  };
  const auto resuming = [&](const std::string& name) {
    return [&, name](auto& optimizer, auto stream, const auto& step) {
      const auto report = checkpoint::load(optimizer, folder / name, {.files = &files}, stream);
      if (report.iteration != 3) throw std::runtime_error("another iteration was loaded");
      optimizer.verify_parameters(stream);
      step(3, 6);
      return states_of(optimizer, stream);
    };
  };
  CHECK(on_devices(saving("devices")) == unbroken);
  CHECK(with_host(saving("host")) == unbroken);
  CHECK(on_devices(resuming("host")) == unbroken);
  CHECK(with_host(resuming("devices")) == unbroken);
  CHECK(on_devices(resuming("devices")) == unbroken);
}

}  // namespace

TEST_CASE("What GPUs saved goes on on the host, and what the host saved on GPUs, with the same bits",
          "[checkpoint][cuda][B081]") {
  require_devices(world);
  exchange_with_host([](const auto& body) { return with_gpus(body); });
}

TEST_CASE("What threads on several GPUs saved goes on on the host, and back, with the same bits",
          "[checkpoint][cuda][B069][B081]") {
  const std::vector<int> devices = GENERATE(values<std::vector<int>>({{0, 1}, {2, 1}}));
  require_peers(3);
  CAPTURE(devices);
  exchange_with_host([&](const auto& body) { return with_threads(devices, body); });
}

TEST_CASE("GPUs train on while their checkpoint is written, and it holds the state at the call",
          "[checkpoint][cuda][B086]") {
  require_devices(world);
  const ScratchFolder folder;
  QuickFiles files;
  std::vector<float> then;
  static_cast<void>(with_gpus([&](auto& optimizer, auto stream, const auto& step) {
    checkpoint::AsyncSaver saver;
    step(0, 2);
    const auto states = states_of(optimizer, stream);
    saver.save(optimizer, folder.path(), {.files = &files}, stream);
    step(2, 4);
    if (optimizer.rank() == 0) then = states;
    saver.save(optimizer, folder.path(), {.files = &files}, stream);
    static_cast<void>(saver.wait(optimizer));
    return states;
  }));
  const auto generations = checkpoint::generations(folder.path(), files);
  REQUIRE(generations.size() == 2);
  const auto loaded = with_gpus([&](auto& optimizer, auto stream, const auto&) {
    checkpoint::load(optimizer, generations[0].path, {.files = &files}, stream);
    return states_of(optimizer, stream);
  });
  CHECK(loaded == then);
}

TEST_CASE("A damaged checkpoint leaves GPUs as they were", "[checkpoint][cuda]") {
  require_devices(world);
  const ScratchFolder folder;
  QuickFiles files;
  static_cast<void>(with_gpus([&](auto& optimizer, auto stream, const auto& step) {
    step(0, 1);
    checkpoint::save(optimizer, folder.path(), {.files = &files}, stream);
    return std::vector<float>();
  }));
  const auto path = checkpoint::newest(folder.path(), files);
  const auto shard = path / checkpoint::shard_name({{"pp", 0, 1}}, 1, world);
  std::filesystem::resize_file(shard, std::filesystem::file_size(shard) - 4);
  std::string told;
  const auto after = with_gpus([&](auto& optimizer, auto stream, const auto& step) {
    step(0, 1);
    const auto before = states_of(optimizer, stream);
    std::string message;
    try {
      checkpoint::load(optimizer, folder.path(), {.files = &files}, stream);
    } catch (const so::CheckpointError& error) {
      message = error.what();
    }
    if (optimizer.rank() == 0) told = message;
    step(1, 2);
    auto states = states_of(optimizer, stream);
    states.push_back(before.empty() ? 0.0f : 1.0f);
    return states;
  });
  CHECK(told.find("dp-1-of-2.safetensors' has") != std::string::npos);
  auto expected = with_gpus([&](auto& optimizer, auto stream, const auto& step) {
    step(0, 2);
    return states_of(optimizer, stream);
  });
  expected.push_back(1.0f);
  CHECK(after == expected);
}
