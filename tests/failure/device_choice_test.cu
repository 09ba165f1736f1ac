// SPDX-License-Identifier: Apache-2.0
#include <shardopt/cuda.cuh>

#include <support/cuda_calls.hpp>
#include <support/cuda_ranks.hpp>
#include <support/message_of.hpp>
#include <support/processes.hpp>
#include <support/require_devices.hpp>
#include <support/unique_id_board.hpp>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace so = shardopt;
using Catch::Matchers::ContainsSubstring;
using namespace std::chrono_literals;

TEST_CASE("two processes on one GPU are both told which ranks share which device", "[failure][cuda][B069]") {
  const auto deadline = GENERATE(0ms, 5000ms);
  CAPTURE(deadline.count());
  support::UniqueIdBoard& board = support::make_unique_id_board();
  const auto ends = support::run_processes(
      2,
      [&](int rank) -> std::string {
        so::Cuda::select(0);
        const test::OwnStream stream;
        try {
          const so::Nccl comm = so::Nccl::create(board.meet(rank), rank, 2, stream, {.deadline = deadline});
        } catch (const so::Error& error) {
          return error.what();
        }
        return "joined";
      },
      60s);
  for (int rank = 0; rank < 2; ++rank) {
    const auto& end = ends[static_cast<std::size_t>(rank)];
    CAPTURE(rank, end.text, end.signal);
    CHECK(end.exit_code == 0);
    CHECK(end.seconds < 30);
    CHECK_THAT(end.text, ContainsSubstring("rank " + std::to_string(rank) + " of 2 on device 0 (") &&
                             ContainsSubstring("cannot join") && ContainsSubstring("Threads<Cuda>"));
    // NCCL's own words
    CHECK_THAT(end.text, ContainsSubstring("ranks 0 and 1 both") ||
                             ContainsSubstring("rank 0 and rank 1 both") ||
                             ContainsSubstring("rank 1 and rank 0 both"));
  }
}

TEST_CASE("a device that does not exist is refused by its number, beside those that do",
          "[failure][cuda][B069]") {
  test::require_devices(1);
  int count = 0;
  test::succeed(cudaGetDeviceCount(&count));
  const int ordinal = GENERATE_COPY(-1, count, count + 7);
  const auto refusal_of = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "nothing was refused";
  };
  for (const std::string& text : {refusal_of([&] { so::Cuda::select(ordinal); }), refusal_of([&] {
                                    (void)so::Threads<so::Cuda>::make({{.device = 0}, {.device = ordinal}});
                                  })}) {
    CHECK_THAT(text, ContainsSubstring("device " + std::to_string(ordinal) + " does not exist"));
    CHECK_THAT(text, ContainsSubstring(count == 1 ? "one device, 0" : "0 to " + std::to_string(count - 1)));
    CHECK_THAT(text, ContainsSubstring("CUDA_VISIBLE_DEVICES"));
  }
  CHECK(cudaDeviceSynchronize() == cudaSuccess);  // nothing is left behind
  CHECK(so::Cuda::select(count - 1).ordinal() == count - 1);
  so::Cuda::select(0);
}

TEST_CASE("devices that cannot read each other's memory are refused by their numbers, before a rank begins",
          "[failure][cuda][B069]") {
  test::require_peers(3);
  namespace calls = test::cuda_calls;
  const auto [from, to] = GENERATE(values<std::pair<int, int>>({{0, 2}, {2, 0}}));
  CAPTURE(from, to);
  const std::vector<so::ThreadSeat> seats{{.device = 0}, {.device = 1}, {.device = 0}, {.device = 2}};
  const auto told = [&](bool make) {
    return test::message_of([&] {
      if (make) return static_cast<void>(so::Threads<so::Cuda>::make(seats));
      so::Threads<so::Cuda>::run(
          seats, [](const so::Threads<so::Cuda>&) { throw std::runtime_error("a rank has begun"); });
    });
  };
  const std::string refusal = "device " + std::to_string(from) + " cannot read the memory of device " +
                              std::to_string(to) + "; Threads<Cuda> needs one device or peers, use Nccl";
  for (const bool make : {true, false}) {
    calls::reset();
    calls::part(from, to);
    CHECK(told(make) == "shardopt: " + refusal);
    calls::reset();
    calls::fail("cudaDeviceEnablePeerAccess", 0, cudaErrorTooManyPeers);
    const std::string failed = told(make);
    CHECK_THAT(failed, ContainsSubstring("cudaDeviceEnablePeerAccess failed: cudaErrorTooManyPeers"));
    CHECK_THAT(failed, ContainsSubstring("device 0 cannot read the memory of device 1"));
    calls::reset();
    calls::fail("cudaDeviceCanAccessPeer", 0, cudaErrorNotSupported);
    CHECK_THAT(told(make), ContainsSubstring("cudaDeviceCanAccessPeer failed: cudaErrorNotSupported"));
    calls::reset();
  }
  int current = -1;
  CHECK(cudaGetDevice(&current) == cudaSuccess);
  CHECK(current == 0);
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  CHECK(so::Threads<so::Cuda>::make(seats).size() == 4);
}

TEST_CASE("devices that were made peers before are taken as they are", "[failure][cuda][B069]") {
  test::require_peers(2);
  static_cast<void>(cudaDeviceEnablePeerAccess(1, 0));  // or an earlier test has
  static_cast<void>(cudaGetLastError());
  for (int again = 0; again < 2; ++again)
    CHECK(so::Threads<so::Cuda>::make({{.device = 0}, {.device = 1}}).size() == 2);
  CHECK(cudaPeekAtLastError() == cudaSuccess);  // that they were peers before is no failure to leave behind
}
