// SPDX-License-Identifier: Apache-2.0
#include <shardopt/cuda.cuh>

#include <support/cuda_ranks.hpp>
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
