// SPDX-License-Identifier: Apache-2.0
#include <shardopt/cuda.cuh>

#include <support/cuda_ranks.hpp>
#include <support/processes.hpp>
#include <support/require_devices.hpp>
#include <support/unique_id_board.hpp>

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace so = shardopt;
using Catch::Matchers::ContainsSubstring;
using namespace std::chrono_literals;

namespace {

constexpr int world = 4;
constexpr std::size_t elements = 1031;  // two buckets
constexpr float lr = 0x1p-10f;

using Optimizer = so::ZeroOptimizer<so::SGD, so::FlatSharding, so::Nccl, so::FullPrecision>;

/// One of the two models of a rank, with an optimizer of its own.
class Model {
 public:
  Model(so::Nccl comm, cudaStream_t stream) : stream_(stream), optimizer_(make(std::move(comm))) {}

  so::StepTicket step() {
    gradients_.write(std::vector<float>(elements, 1.0f), stream_);
    return optimizer_.step({}, stream_);
  }

  [[nodiscard]] std::vector<float> parameters() const {
    optimizer_.wait_parameters(stream_);
    return parameters_.read(stream_);
  }

 private:
  [[nodiscard]] Optimizer make(so::Nccl comm) const {
    parameters_.fill(0, stream_);
    so::ParameterTable table;
    table.add({.name = "a", .shape = {static_cast<std::int64_t>(elements)}, .offset = 0});
    return Optimizer(table, {.groups = {{"default", {.lr = lr}}}, .sharding = {.bucket_bytes = 2048}},
                     std::move(comm), so::FlatBuffers{parameters_.data(), gradients_.data()}, stream_);
  }

  cudaStream_t stream_;
  test::OwnMemory<float> parameters_{elements};
  test::OwnMemory<float> gradients_{elements};
  Optimizer optimizer_;
};

/// What a rank says where a machine has fewer GPUs than there are ranks.
const std::string too_few_devices = "too few GPUs";

std::string error_of(const so::StepTicket& ticket) {
  try {
    static_cast<void>(ticket.get());
  } catch (const so::CollectiveError& error) {
    return error.what();
  }
  return "no exception";
}

/// Ranks 0 and 1 step one model first, ranks 2 and 3 the other, on one stream: neither can go on.
/// @return what the rank was told of each
std::string step_across(support::UniqueIdBoard& first, support::UniqueIdBoard& second, int rank) {
  int devices = 0;
  test::succeed(cudaGetDeviceCount(&devices));
  if (devices < world) return too_few_devices;
  so::Cuda::select(rank);
  const test::OwnStream stream;
  const test::OwnStream communication;
  const so::NcclOptions options{.deadline = 3s};
  Model one(so::Nccl::create(first.meet(rank), rank, world, communication, options), stream);
  Model other(so::Nccl::create(second.meet(rank), rank, world, communication, options), stream);
  Model& begins = rank < 2 ? one : other;
  Model& follows = rank < 2 ? other : one;
  const so::StepTicket ticket = begins.step();
  const so::StepTicket behind = follows.step();
  return "begins: " + error_of(ticket) + "\nfollows: " + error_of(behind);
}

std::vector<std::vector<float>> step_in_one_order(int rounds) {
  const test::Communicators first(world);
  const test::Communicators second(world);
  std::vector<std::vector<float>> got(2 * world);
  test::on_ranks(world, [&](int rank) {
    const test::OwnStream stream;
    const test::OwnStream communication;
    Model one(so::Nccl::borrow(first[rank], communication), stream);
    Model other(so::Nccl::borrow(second[rank], communication), stream);
    for (int round = 0; round < rounds; ++round) {
      const so::StepTicket ticket = one.step();
      const so::StepTicket behind = other.step();
      if (round % 8 == rank) static_cast<void>(behind.get().updates + ticket.get().updates);
    }
    got[static_cast<std::size_t>(rank)] = one.parameters();
    got[static_cast<std::size_t>(world + rank)] = other.parameters();
  });
  return got;
}

}  // namespace

TEST_CASE("GPUs that step two optimizers in different orders are all told what waits",
          "[failure][cuda][B068]") {
  support::UniqueIdBoard& first = support::make_unique_id_board();
  support::UniqueIdBoard& second = support::make_unique_id_board();
  const auto ends = support::run_processes(
      world, [&](int rank) { return step_across(first, second, rank); }, 90s);
  if (ends[0].text == too_few_devices) SKIP("needs " << world << " GPUs");
  for (int rank = 0; rank < world; ++rank) {
    const auto& end = ends[static_cast<std::size_t>(rank)];
    CAPTURE(rank, end.text, end.signal);
    CHECK(end.exit_code == 0);
    // Where one communicator is given up first, what waited behind it goes on.
    CHECK_THAT(end.text, ContainsSubstring("rank " + std::to_string(rank) +
                                           ": iteration 1, the reduction of bucket 1 has not finished"));
  }
}

TEST_CASE("GPUs that step two optimizers in one order never wait for ever", "[failure][cuda][B068]") {
  constexpr int rounds = 1000;
  test::require_devices(world);
  // Exact: each step takes 2^-8 away.
  const std::vector<float> expected(elements, -lr * static_cast<float>(world) * static_cast<float>(rounds));
  for (const auto& parameters : step_in_one_order(rounds)) CHECK((parameters == expected));
}
