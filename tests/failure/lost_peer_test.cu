// SPDX-License-Identifier: Apache-2.0
#include <shardopt/cuda.cuh>

#include <support/cuda_ranks.hpp>
#include <support/processes.hpp>
#include <support/unique_id_board.hpp>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include <chrono>
#include <csignal>
#include <string>
#include <vector>

namespace so = shardopt;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;
using namespace std::chrono_literals;

namespace {

constexpr std::int64_t elements = 10000;

struct Buffers {
  Buffers() {
    so::throw_if_failed(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                        "cudaStreamCreateWithFlags");
    so::throw_if_failed(cudaStreamCreateWithFlags(&comm_stream, cudaStreamNonBlocking),
                        "cudaStreamCreateWithFlags");
    so::throw_if_failed(cudaMalloc(&parameters, elements * sizeof(float)), "cudaMalloc");
    so::throw_if_failed(cudaMalloc(&gradients, elements * sizeof(float)), "cudaMalloc");
    so::throw_if_failed(cudaMemsetAsync(parameters, 0, elements * sizeof(float), stream), "cudaMemsetAsync");
    so::throw_if_failed(cudaMemsetAsync(gradients, 0, elements * sizeof(float), stream), "cudaMemsetAsync");
  }
  cudaStream_t stream = nullptr;
  cudaStream_t comm_stream = nullptr;
  float* parameters = nullptr;
  float* gradients = nullptr;
};

using Optimizer = so::ZeroOptimizer<so::AdamW, so::FlatSharding, so::Nccl, so::FullPrecision>;

so::ParameterTable make_table() {
  so::ParameterTable table;
  table.add({.name = "a", .shape = {elements}, .offset = 0});
  return table;
}

/// What a rank says where a machine has fewer GPUs than there are ranks.
const std::string too_few_devices = "too few GPUs";

constexpr int survivors_world = 4;
constexpr int lost_rank = 2;

/// Ten steps. All that the third enqueues is enqueued when rank 2 dies, and nothing before it is under way.
/// @return the text of the exception and that of the next one
std::string survive(support::UniqueIdBoard& board, int rank, std::chrono::milliseconds deadline) {
  int devices = 0;
  so::throw_if_failed(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  if (devices < survivors_world) return too_few_devices;
  so::throw_if_failed(cudaSetDevice(rank), "cudaSetDevice");
  Buffers buffers;
  const ncclUniqueId id = board.meet(rank);
  Optimizer optimizer(
      make_table(), {.sharding = {.bucket_bytes = 16384}},
      so::Nccl::create(id, rank, survivors_world, buffers.comm_stream, {.deadline = deadline}),
      so::FlatBuffers{buffers.parameters, buffers.gradients}, buffers.stream);
  std::string first;
  for (int step = 1; step <= 10; ++step) {
    if (step == 3 && rank == lost_rank) {
      board.wait_for_all(survivors_world);
      raise(SIGKILL);
    }
    try {
      const so::StepTicket ticket = optimizer.step({}, buffers.stream);
      if (step == 3) board.wait_for_all(survivors_world);
      const so::StepResult result = ticket.get();
      optimizer.wait_parameters(buffers.stream);
      if (result.iteration != step) return "wrong iteration";
      so::throw_if_failed(cudaStreamSynchronize(buffers.stream), "cudaStreamSynchronize");
      so::throw_if_failed(cudaStreamSynchronize(buffers.comm_stream), "cudaStreamSynchronize");
    } catch (const so::Error& error) {
      if (!first.empty()) return first + "\nagain: " + error.what();
      first = error.what();
    }
  }
  return "no exception";
}

/// Every survivor throws soon: its rank, the step, and of the step's three buckets the one reduced first.
void require_survivors(std::chrono::milliseconds deadline, const std::string& reason) {
  support::UniqueIdBoard& board = support::make_unique_id_board();
  const auto ends = support::run_processes(
      survivors_world, [&](int rank) { return survive(board, rank, deadline); }, 60s);
  if (ends[0].text == too_few_devices) SKIP("needs " << survivors_world << " GPUs");
  CHECK(ends[lost_rank].signal == SIGKILL);
  for (int rank = 0; rank < survivors_world; ++rank) {
    if (rank == lost_rank) continue;
    const auto& end = ends[static_cast<std::size_t>(rank)];
    CAPTURE(rank, end.text, end.signal);
    CHECK(end.exit_code == 0);
    CHECK_THAT(end.text, StartsWith("shardopt: rank " + std::to_string(rank) +
                                    ": iteration 3, the reduction of bucket 2 has not finished; " + reason) &&
                             ContainsSubstring("again: "));
    CHECK(end.seconds - ends[lost_rank].seconds < 4);
  }
}

}  // namespace

TEST_CASE("when a process is killed every survivor throws, naming its rank, the step and the bucket",
          "[failure][cuda][B067]") {
  require_survivors(2s, "");
}

TEST_CASE("what NCCL reports of a killed process is thrown at once, long before the deadline",
          "[failure][cuda][B067]") {
  require_survivors(30s, std::string("NCCL reports: ") + ncclGetErrorString(ncclRemoteError));
}

TEST_CASE("waiting under a deadline leaves no error behind for the engine to find", "[failure][cuda]") {
  const auto ends = support::run_processes(
      1,
      [](int) -> std::string {
        Buffers buffers;
        ncclUniqueId id;
        so::throw_if_failed(ncclGetUniqueId(&id), "ncclGetUniqueId");
        const so::Nccl comm = so::Nccl::create(id, 0, 1, buffers.comm_stream, {.deadline = 20s});
        so::Cuda::Event event = comm.device().make_event();
        for (int turn = 0; turn < 20; ++turn) {
          so::throw_if_failed(
              cudaMemsetAsync(buffers.gradients, turn, elements * sizeof(float), buffers.stream),
              "cudaMemsetAsync");
          comm.device().record(event, buffers.stream);
          comm.waiter()(event);
          if (cudaPeekAtLastError() != cudaSuccess) return cudaGetErrorName(cudaPeekAtLastError());
        }
        return "none";
      },
      60s);
  CHECK(ends[0].text == "none");
}

TEST_CASE("a peer that never joins is reported soon after the deadline", "[failure][cuda][B067]") {
  support::UniqueIdBoard& board = support::make_unique_id_board();
  const auto ends = support::run_processes(
      1,
      [&](int rank) -> std::string {
        Buffers buffers;
        const ncclUniqueId id = board.meet(rank);
        try {
          const so::Nccl comm = so::Nccl::create(id, rank, 2, buffers.comm_stream, {.deadline = 2s});
        } catch (const so::CollectiveError& error) {
          const ncclUniqueId other = [] {
            ncclUniqueId fresh;
            so::throw_if_failed(ncclGetUniqueId(&fresh), "ncclGetUniqueId");
            return fresh;
          }();
          const so::Nccl again = so::Nccl::create(other, 0, 1, buffers.comm_stream, {.deadline = 2s});
          return std::string(error.what()) + (again.world() == 1 ? "; a new one works" : "");
        }
        return "joined";
      },
      60s);
  CAPTURE(ends[0].text);
  CHECK(ends[0].exit_code == 0);
  CHECK_THAT(ends[0].text, ContainsSubstring("rank 0") &&
                               ContainsSubstring("not all 2 ranks have come within 2000 ms") &&
                               ContainsSubstring("a new one works"));
  CHECK(ends[0].seconds > 2);
  CHECK(ends[0].seconds < 4);
}

TEST_CASE("one thread that makes several ranks' optimizers is told, and does not wait for ever",
          "[failure][cuda][B068]") {
  const bool refused = GENERATE(false, true);  // whether its first rank also makes a mistake of its own
  const auto ends = support::run_processes(
      1,
      [&](int) -> std::string {
        int devices = 0;
        so::throw_if_failed(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
        if (devices < 2) return too_few_devices;
        // Left to the process, as is what waits in the communicator's stream.
        const auto& comms = *new test::Communicators(2);
        std::vector<Buffers*> buffers;
        try {
          for (int rank = 0; rank < 2; ++rank) {
            so::throw_if_failed(cudaSetDevice(rank), "cudaSetDevice");
            const Buffers& own = *buffers.emplace_back(new Buffers);
            new Optimizer(make_table(), {.sharding = {.bucket_bytes = refused ? 0 : 16384}},
                          so::Nccl::borrow(comms[rank], own.comm_stream, {.deadline = 2s}),
                          so::FlatBuffers{own.parameters, own.gradients}, own.stream);
          }
        } catch (const std::exception& error) {
          return error.what();
        }
        return "made";
      },
      30s);
  if (ends[0].text == too_few_devices) SKIP("needs 2 GPUs");
  CAPTURE(refused, ends[0].text, ends[0].signal);
  CHECK(ends[0].exit_code == 0);
  CHECK_THAT(ends[0].text,
             ContainsSubstring(refused ? "bucket_bytes" : "rank 0: the start, to which all ranks must come"));
}
