// SPDX-License-Identifier: Apache-2.0
#include <shardopt/collectives/nccl.cuh>

#include <support/cuda_ranks.hpp>
#include <support/message_of.hpp>
#include <support/require_devices.hpp>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace so = shardopt;
using namespace test;
using namespace std::chrono_literals;

namespace {

/// A communicator of one GPU, that an abort takes away.
ncclComm_t lone_communicator() {
  ncclUniqueId id;
  succeed(ncclGetUniqueId(&id));
  ncclComm_t comm = nullptr;
  succeed(ncclCommInitRank(&comm, 1, id, 0));
  return comm;
}

/// Two users of a communicator who may both abort it; the second has summed.
struct Borrowers {
  OwnStream stream;
  OwnMemory<std::int64_t> words{4};
  so::Nccl first = so::Nccl::borrow(lone_communicator(), stream, {.abort_borrowed = true});
  so::Nccl second = so::Nccl::borrow(first.native(), stream, {.abort_borrowed = true});

  Borrowers() {
    words.fill(0, stream);
    second.all_reduce(words.data(), 4);
  }
};

}  // namespace

TEST_CASE("A communicator that is borrowed twice is aborted once, for both", "[collectives][cuda]") {
  require_devices(1);
  Borrowers both;
  auto& [stream, words, first, second] = both;
  stream.synchronize();
  first.abort("enough");
  CHECK(first.native() == nullptr);
  CHECK(second.native() == nullptr);
  for (so::Nccl* each : {&first, &second}) {
    CHECK_FALSE(each->stuck());
    CHECK(message_of<so::CollectiveError>([&] { each->all_reduce(words.data(), 4); }).find("enough") !=
          std::string::npos);
  }
  second.abort("too");  // not a second time: the communicator is no more
}

TEST_CASE("A borrower that may not abort leaves the others the communicator", "[collectives][cuda]") {
  require_devices(1);
  const OwnStream stream;
  const OwnMemory<std::int64_t> words(4);
  words.fill(0, stream);
  const Communicators comms(1);
  so::Nccl first = so::Nccl::borrow(comms[0], stream);
  so::Nccl second = so::Nccl::borrow(comms[0], stream);
  first.abort("enough");
  CHECK(first.stuck());
  CHECK(message_of<so::CollectiveError>([&] { first.all_reduce(words.data(), 4); }).find("enough") !=
        std::string::npos);
  second.all_reduce(words.data(), 4);
  stream.synchronize();
}

TEST_CASE("One that the library made takes its borrowers along", "[collectives][cuda]") {
  require_devices(1);
  const OwnStream stream;
  const OwnMemory<std::int64_t> words(4);
  words.fill(0, stream);
  ncclUniqueId id;
  succeed(ncclGetUniqueId(&id));
  so::Nccl owner = so::Nccl::create(id, 0, 1, stream);
  so::Nccl borrower = so::Nccl::borrow(owner.native(), stream, {.abort_borrowed = true});
  const bool by_the_borrower = GENERATE(false, true);
  (by_the_borrower ? borrower : owner).abort("enough");
  CHECK(message_of<so::CollectiveError>([&] { owner.all_reduce(words.data(), 4); }).find("enough") !=
        std::string::npos);
  CHECK(message_of<so::CollectiveError>([&] { borrower.all_reduce(words.data(), 4); }).find("enough") !=
        std::string::npos);
}

TEST_CASE("A communicator at an old one's place is a new one", "[collectives][cuda]") {
  require_devices(1);
  const OwnStream stream;
  const OwnMemory<std::int64_t> words(4);
  words.fill(0, stream);
  for (int turn = 0; turn < 3; ++turn) {
    so::Nccl old = so::Nccl::borrow(lone_communicator(), stream, {.abort_borrowed = true});
    old.abort("enough");
    ncclComm_t fresh = lone_communicator();
    so::Nccl comm = so::Nccl::borrow(fresh, stream);
    comm.all_reduce(words.data(), 4);
    stream.synchronize();
    succeed(ncclCommDestroy(fresh));
  }
}

TEST_CASE("Reductions that there are not are refused before anything is sent", "[collectives][cuda][law9]") {
  require_devices(1);
  using so::Dtype;
  using so::Reduction;
  for (const Dtype type : {Dtype::fp32, Dtype::bf16, Dtype::fp16}) {
    CHECK(so::Nccl::supports(Reduction::ordered, type));
    CHECK(so::Nccl::supports(Reduction::native, type));
  }
  for (const Dtype type : {Dtype::int64, Dtype::uint8}) {
    CHECK_FALSE(so::Nccl::supports(Reduction::ordered, type));
    CHECK(so::Nccl::supports(Reduction::native, type));
  }
  const OwnStream stream;
  const Communicators comms(1);
  so::Nccl comm = so::Nccl::borrow(comms[0], stream);
  const std::vector<std::int64_t> borders{0, 4};
  const auto refusal = [&](Reduction reduction, Dtype type) {
    return message_of<std::invalid_argument>(
        [&] { comm.reduce_scatter(nullptr, {borders}, type, reduction, nullptr); });
  };
  CHECK(refusal(Reduction::automatic, Dtype::fp32).find("no automatic reduction of fp32") !=
        std::string::npos);
  CHECK(refusal(Reduction::ordered, Dtype::int64).find("no ordered reduction of int64") != std::string::npos);
}

TEST_CASE("Layouts, roots and room that do not fit the world are refused by NCCL's collective, too",
          "[collectives][cuda][law9]") {
  require_devices(1);
  const OwnStream stream;
  const Communicators comms(1);
  so::Nccl comm = so::Nccl::borrow(comms[0], stream);
  const std::vector<std::int64_t> borders{0, 2, 4};
  std::vector<std::byte> mine(2);
  std::vector<std::byte> all(1);
  const auto refusal = [](const auto& call) { return message_of<std::invalid_argument>(call); };
  CHECK(refusal([&] {
          comm.reduce_scatter(nullptr, {borders}, so::Dtype::fp32, so::Reduction::native, nullptr);
        }).find("a layout of 2 blocks for a world of 1") != std::string::npos);
  CHECK(refusal([&] {
          comm.all_gather(nullptr, {borders}, so::Dtype::fp32);
        }).find("a layout of 2 blocks for a world of 1") != std::string::npos);
  CHECK(refusal([&] { comm.broadcast(nullptr, 4, 1); }).find("rank 1 of a world of 1") != std::string::npos);
  CHECK(refusal([&] { comm.exchange(mine, all, nullptr); }).find("gives 2 bytes, there is room for 1") !=
        std::string::npos);
}

TEST_CASE("A call of NCCL that waits longer than the deadline is reported", "[collectives][cuda]") {
  require_devices(1);
  const OwnStream stream;
  so::detail::NcclHandle handle(lone_communicator(), true, 0, so::Cuda::of(stream), {.deadline = 200ms});
  handle.label("iteration 1, the reduction of bucket 0");
  const auto message = message_of<so::CollectiveError>([&] {
    handle.enqueue("ncclReduceScatter", stream, [](ncclComm_t) {
      std::this_thread::sleep_for(900ms);  // as one that connects to a peer that has not come
      return ncclSuccess;
    });
  });
  CHECK(message.find(
            "iteration 1, the reduction of bucket 0 has not begun; a call of NCCL has waited for 200 ms") !=
        std::string::npos);
}

TEST_CASE("Who waits without a deadline is told of an abort, when the event has come",
          "[collectives][cuda]") {
  require_devices(1);
  Borrowers both;
  auto& [stream, words, first, second] = both;
  so::Cuda::Event event = second.device().make_event();
  second.device().record(event, stream);
  first.abort("enough");
  CHECK(message_of<so::CollectiveError>([&] { second.waiter()(event); }).find("enough") != std::string::npos);
}

TEST_CASE("What waits for events outlives the communicator", "[collectives][cuda]") {
  require_devices(1);
  const OwnStream stream;
  const auto deadline = GENERATE(0ms, 100ms);
  so::Cuda::Event event = so::Cuda::of(stream).make_event();
  so::Cuda::of(stream).record(event, stream);
  std::vector<std::function<void(const so::Cuda::Event&)>> waiters;
  ncclUniqueId id;
  succeed(ncclGetUniqueId(&id));
  {
    const so::Nccl own = so::Nccl::create(id, 0, 1, stream, {.deadline = deadline});
    const Communicators comms(1);
    so::Nccl borrowed = so::Nccl::borrow(comms[0], stream, {.deadline = deadline});
    waiters = {own.waiter(), borrowed.waiter()};
    borrowed = so::Nccl::borrow(comms[0], stream, {.deadline = deadline});
    waiters.push_back(borrowed.waiter());
  }
  std::this_thread::sleep_for(100ms);  // nobody asks NCCL for what has gone
  for (const auto& wait : waiters) CHECK_NOTHROW(wait(event));
}

TEST_CASE("Verified calls are compared before one is refused", "[collectives][cuda]") {
  require_devices(2);
  const Communicators comms(2);
  std::vector<std::string> told(2);
  on_ranks(2, [&](int rank) {
    const OwnStream stream;
    so::Nccl comm = so::Nccl::borrow(comms[rank], stream).verifying_calls();
    const std::vector<std::int64_t> borders{0, 2, 4};
    told[static_cast<std::size_t>(rank)] = message_of<so::CollectiveError>([&] {
      comm.reduce_scatter(nullptr, {borders}, so::Dtype::fp32,
                          rank == 0 ? so::Reduction::automatic : so::Reduction::native, nullptr);
    });
  });
  for (const std::string& text : told)
    CHECK(text.find("rank 0 reduce_scatter of 4 fp32") != std::string::npos);
}

TEST_CASE("Verified calls cannot be captured, and name what differs", "[collectives][cuda]") {
  require_devices(2);
  const Communicators comms(2);
  std::vector<std::string> differs(2);
  std::vector<std::string> captured(2);
  on_ranks(2, [&](int rank) {
    const OwnStream stream;
    const OwnMemory<std::int64_t> words(4);
    words.fill(0, stream);
    so::Nccl comm = so::Nccl::borrow(comms[rank], stream).verifying_calls();
    comm.all_reduce(words.data(), 4);
    succeed(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    captured[static_cast<std::size_t>(rank)] =
        message_of<std::logic_error>([&] { comm.all_reduce(words.data(), 4); });
    cudaGraph_t graph = nullptr;
    succeed(cudaStreamEndCapture(stream, &graph));
    succeed(cudaGraphDestroy(graph));
    differs[static_cast<std::size_t>(rank)] =
        message_of<so::CollectiveError>([&] { comm.all_reduce(words.data(), 3 + rank); });
  });
  for (const std::string& text : captured) CHECK(text.find("cannot be captured") != std::string::npos);
  for (const std::string& text : differs) {
    CHECK(text.find("rank 0 all_reduce of 3 int64") != std::string::npos);
    CHECK(text.find("rank 1 all_reduce of 4 int64") != std::string::npos);
  }
}
