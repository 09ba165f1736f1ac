// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <shardopt/collectives/threads.hpp>
#include <support/small_engine.hpp>

#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

using namespace test;

namespace {

/// Block borders of a world: unequal, one of them empty.
std::vector<std::int64_t> borders_of(int world) {
  std::vector<std::int64_t> borders{0};
  for (int rank = 0; rank < world; ++rank) borders.push_back(borders.back() + (rank == 1 ? 0 : 5 * rank + 3));
  return borders;
}

}  // namespace

TEMPLATE_TEST_CASE("reduce_scatter sums each block onto its rank and leaves the others' alone",
                   "[collectives][host]", float, so::bf16, so::fp16) {
  const int world = GENERATE(1, 2, 3, 5, 8);
  const auto borders = borders_of(world);
  const auto size = static_cast<std::size_t>(borders.back());
  const auto element = [](int rank, std::size_t i) {
    return rounded<TestType>(static_cast<double>(rank + 1) * static_cast<double>(i % 7));
  };
  const auto wrong = on_ranks(world, [&](HostThreads comm) {
    const int rank = comm.rank();
    std::vector<TestType> data;
    for (std::size_t i = 0; i < size; ++i) data.push_back(element(rank, i));
    comm.reduce_scatter(data.data(), {borders}, so::dtype_of<TestType>, so::Reduction::ordered, nullptr);
    int count = 0;
    const so::Range own = so::BlockLayout{borders}.block(rank);
    for (std::size_t i = 0; i < size; ++i) {
      const double sum = static_cast<double>(world * (world + 1) / 2) * static_cast<double>(i % 7);
      const TestType expected =
          own.contains(static_cast<std::int64_t>(i)) ? rounded<TestType>(sum) : element(rank, i);
      count += bits_of(data[i]) != bits_of(expected) ? 1 : 0;
    }
    return count;
  });
  CHECK(wrong == std::vector<int>(static_cast<std::size_t>(world), 0));
}

TEST_CASE("all_gather brings every rank's block to every rank", "[collectives][host]") {
  const int world = GENERATE(1, 2, 3, 8);
  const auto borders = borders_of(world);
  const auto gathered = on_ranks(world, [&](HostThreads comm) {
    const so::Range own = so::BlockLayout{borders}.block(comm.rank());
    std::vector<float> data(static_cast<std::size_t>(borders.back()), -1.0f);
    for (std::int64_t i = own.begin; i < own.end; ++i)
      data[static_cast<std::size_t>(i)] = static_cast<float>(i);
    comm.all_gather(data.data(), {borders}, so::Dtype::fp32);
    return data;
  });
  for (const auto& data : gathered) {
    for (std::size_t i = 0; i < data.size(); ++i) REQUIRE(data[i] == static_cast<float>(i));
  }
}

TEST_CASE("all_reduce wraps around 2^64, broadcast copies the root's, exchange brings all to all",
          "[collectives][host]") {
  const auto seen = on_ranks(3, [](HostThreads comm) {
    const int rank = comm.rank();
    std::vector<std::int64_t> words{rank, -rank, rank == 0 ? INT64_MAX : 1, 0};
    comm.all_reduce(words.data(), 3);
    std::int64_t told = rank * 100;
    comm.broadcast(&told, sizeof told, 2);
    words.push_back(told);
    const std::int64_t mine = 7 + rank;
    std::vector<std::int64_t> all(3);
    comm.exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)), nullptr);
    words.insert(words.end(), all.begin(), all.end());
    return words;
  });
  for (const auto& words : seen)
    CHECK(words == std::vector<std::int64_t>{3, -3, INT64_MIN + 1, 0, 200, 7, 8, 9});
}

TEST_CASE("Threads knows only ordered reductions, and says so", "[collectives][host]") {
  CHECK(HostThreads::supports(so::Reduction::ordered, so::Dtype::fp32));
  CHECK(HostThreads::supports(so::Reduction::automatic, so::Dtype::bf16));
  CHECK_FALSE(HostThreads::supports(so::Reduction::native, so::Dtype::fp32));
  CHECK(HostThreads::automatic_reduction(so::Dtype::fp16) == so::Reduction::ordered);
}

TEST_CASE("Layouts, roots and room that do not fit the world are refused", "[collectives][host][law9]") {
  HostThreads::run(1, [](HostThreads comm) {
    std::vector<float> values(4);
    const std::vector<std::int64_t> borders{0, 2, 4};
    std::vector<std::byte> mine(2);
    std::vector<std::byte> all(1);
    const auto refusal = [](const auto& call) { return message_of<std::invalid_argument>(call); };
    CHECK(refusal([&] {
            comm.reduce_scatter(values.data(), {borders}, so::Dtype::fp32, so::Reduction::ordered, nullptr);
          }).find("a layout of 2 blocks for a world of 1") != std::string::npos);
    CHECK(refusal([&] {
            comm.all_gather(values.data(), {borders}, so::Dtype::fp32);
          }).find("a layout of 2 blocks for a world of 1") != std::string::npos);
    CHECK(refusal([&] { comm.broadcast(values.data(), 4, 1); }).find("rank 1 of a world of 1") !=
          std::string::npos);
    CHECK(refusal([&] { comm.exchange(mine, all, nullptr); }).find("gives 2 bytes, there is room for 1") !=
          std::string::npos);
  });
}

TEST_CASE("A world needs at least one rank", "[collectives][host]") {
  CHECK_THROWS_AS(HostThreads::make(0), std::invalid_argument);
  CHECK_THROWS_AS(HostThreads::run(-1, [](HostThreads) {}), std::invalid_argument);
}

TEST_CASE("run() rethrows what the rank threw that failed first, not what followed from it",
          "[collectives][host]") {
  struct Own {};
  CHECK_THROWS_AS(HostThreads::run(4,
                                   [](HostThreads comm) {
                                     if (comm.rank() == 3) throw Own{};
                                     comm.barrier();
                                   }),
                  Own);
}

TEST_CASE("run() rethrows a cause, though those who were told of it end before", "[collectives][host]") {
  CHECK_THROWS_AS(HostThreads::run(3,
                                   [](HostThreads comm) {
                                     if (comm.rank() != 1) return comm.barrier();
                                     comm.abort("its engine has failed");
                                     std::this_thread::sleep_for(std::chrono::milliseconds(50));
                                     throw std::out_of_range("the cause");
                                   }),
                  std::out_of_range);
}

TEST_CASE("Engines that run their own threads make the collectives themselves", "[collectives][host]") {
  auto comms = HostThreads::make(3);
  std::vector<int> ranks(3, -1);
  std::vector<std::thread> threads;
  for (int k = 0; k < 3; ++k) {
    threads.emplace_back([&, comm = std::move(comms[static_cast<std::size_t>(k)])]() mutable {
      const HostThreads other = comm.borrow();
      comm.barrier();
      ranks[static_cast<std::size_t>(comm.rank())] = other.rank();
      comm.barrier();
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(ranks == std::vector<int>{0, 1, 2});
}

TEST_CASE("abort() gives every other rank an error with the message, from then on", "[collectives][host]") {
  std::array<int, 3> thrown{};
  const auto messages = messages_of_ranks<so::CollectiveError>(3, [&](HostThreads comm) {
    comm.barrier();
    if (comm.rank() == 1) return comm.abort("disk full");
    try {
      comm.barrier();
    } catch (const so::CollectiveError&) {
      ++thrown[static_cast<std::size_t>(comm.rank())];
    }
    comm.barrier();
  });
  CHECK(thrown == std::array{1, 0, 1});
  CHECK(messages[1] == "");
  for (const std::size_t rank : {0U, 2U})
    CHECK(messages[rank].find("rank 1 failed: disk full") != std::string::npos);
}

TEST_CASE("A collective that is destroyed while others wait for it is an error for them",
          "[collectives][host]") {
  auto comms = HostThreads::make(2);
  std::string message;
  std::thread waiter([&, comm = std::move(comms[0])]() mutable {
    message = message_of<so::CollectiveError>([&] { comm.barrier(); });
  });
  { const HostThreads leaves = std::move(comms[1]); }
  waiter.join();
  CHECK(message.find("rank 1 has left") != std::string::npos);
}

namespace {

/// In static storage: outlives whatever main() made, and whatever the library makes at its first use.
std::vector<HostThreads> kept_to_the_end;  // NOLINT

}  // namespace

TEST_CASE("Collectives in static storage can be let go at the end of the process", "[collectives][host]") {
  // What would go wrong does so at exit: a sanitizer sees it.
  kept_to_the_end = HostThreads::make(2);
  CHECK(kept_to_the_end[1].rank() == 1);
}

TEST_CASE("A rank whose memory others read is not let go by an abort", "[collectives][host][B066]") {
  constexpr std::int64_t size = 1 << 24;
  const std::vector<std::int64_t> borders{0, 0, size};  // rank 0 owns nothing and has done at once
  std::vector<float> sum(2, 0.0f);
  std::vector<std::string> later(2);
  const auto thrown = message_of([&] {
    HostThreads::run(2, [&](HostThreads comm) {
      const auto rank = static_cast<std::size_t>(comm.rank());
      HostThreads view = comm.borrow();
      std::vector<float> data(static_cast<std::size_t>(size), 1.5f);
      comm.barrier();
      std::thread watchdog;
      if (rank == 0) watchdog = std::thread([&] { view.abort("too slow"); });
      const auto message = message_of<so::CollectiveError>([&] {
        comm.reduce_scatter(data.data(), {borders}, so::Dtype::fp32, so::Reduction::ordered, nullptr);
      });
      sum[rank] = message.empty() ? data.back() : 3.0f;  // the abort may have come first
      data = {};                                         // unmapped at once
      if (watchdog.joinable()) watchdog.join();
      later[rank] = message_of<so::CollectiveError>([&] { comm.barrier(); });
    });
  });
  CHECK(thrown == "");
  CHECK(sum[1] == 3.0f);
  for (const std::string& text : later) CHECK(text.find("too slow") != std::string::npos);
}

TEST_CASE("A deadline counts until the last rank has come, not while ranks copy", "[collectives][host]") {
  const auto shared = std::make_shared<so::detail::Rendezvous>(2, std::chrono::milliseconds(1000));
  std::vector<std::string> texts(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const so::detail::ThreadMember member(shared, rank, false);
      texts[static_cast<std::size_t>(rank)] = message_of<so::CollectiveError>([&] {
        member.meet({.operation = "work"}, [&] {
          if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2500));
        });
        member.meet({.operation = "more"}, [] {});
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(texts == std::vector<std::string>(2));
}

TEST_CASE("A rank that throws while others read its memory waits for them first", "[collectives][host]") {
  struct Own {};
  std::atomic<bool> reads{false};
  std::atomic<bool> early{false};
  CHECK_THROWS_AS(
      so::detail::ThreadMember::run(2,
                                    [&](const so::detail::ThreadMember& member) {
                                      const int rank = member.rank();
                                      try {
                                        member.meet({.operation = "work"}, [&] {
                                          if (rank == 0) throw Own{};
                                          reads = true;
                                          std::this_thread::sleep_for(std::chrono::milliseconds(100));
                                          reads = false;
                                        });
                                      } catch (const Own&) {
                                        early = reads.load();
                                        throw;
                                      }
                                    },
                                    {}),
      Own);
  CHECK_FALSE(early);
}

TEST_CASE("Deadlines of any length are kept, and negative ones are refused", "[collectives][host]") {
  for (const auto deadline :
       {std::chrono::milliseconds::max(), std::chrono::milliseconds(std::chrono::hours(24 * 365 * 300))}) {
    CAPTURE(deadline.count());
    CHECK(message_of([&] {
            HostThreads::run(
                3, [](HostThreads comm) { comm.barrier(); }, deadline);
          }) == "");
  }
  const auto refused = [](const auto& body) { return message_of<std::invalid_argument>(body); };
  CHECK(refused([] {
          HostThreads::run(
              2, [](HostThreads) {}, std::chrono::milliseconds(-5));
        }).find("-5 ms") != std::string::npos);
  CHECK(refused([] {
          static_cast<void>(HostThreads::make(2, std::chrono::milliseconds(-1)));
        }).find("negative") != std::string::npos);
}

TEST_CASE("When the system gives no more threads, those that run end and the caller is told",
          "[collectives][host]") {
  // The first rank makes every further thread ask for a stack that no machine has.
  std::size_t usual = 0;
  pthread_attr_t attributes;
  REQUIRE(pthread_getattr_default_np(&attributes) == 0);
  REQUIRE(pthread_attr_getstacksize(&attributes, &usual) == 0);
  int tries = 0;
  std::string message;
  while (message.empty() && ++tries <= 50) {  // all might be started before the first one runs
    message = message_of<std::system_error>([&] {
      HostThreads::run(64, [&](HostThreads comm) {
        if (comm.rank() == 0) {
          pthread_attr_t greedy = attributes;
          pthread_attr_setstacksize(&greedy, std::size_t{1} << 46);
          pthread_setattr_default_np(&greedy);
        }
        comm.barrier();
      });
    });
    REQUIRE(pthread_setattr_default_np(&attributes) == 0);
  }
  pthread_attr_destroy(&attributes);
  CHECK(message != "");
}

TEST_CASE("abort() a second time, or by several threads at once, changes nothing",
          "[collectives][host][B067]") {
  auto comms = HostThreads::make(3);
  comms[1].abort("first");
  std::vector<std::thread> threads;
  for (const std::size_t rank : {0U, 1U, 2U, 2U})
    threads.emplace_back([&comms, rank] { comms[rank].abort("later"); });
  for (std::thread& thread : threads) thread.join();
  for (auto& comm : comms) {
    for (int again = 0; again < 2; ++again) {
      const auto message = message_of<so::CollectiveError>([&] { comm.barrier(); });
      CHECK(message == "shardopt: rank 1 failed: first");
    }
  }
}

TEST_CASE("A rank that never comes is an error after the deadline, and the process can go on",
          "[collectives][host][B067]") {
  using Clock = std::chrono::steady_clock;
  for (int round = 0; round < 2; ++round) {
    auto comms = HostThreads::make(2, std::chrono::milliseconds(400));
    std::int64_t value = 1;
    const auto start = Clock::now();
    const auto first = message_of<so::CollectiveError>([&] { comms[0].all_reduce(&value, 1); });
    const auto waited = Clock::now() - start;
    CHECK(waited >= std::chrono::milliseconds(400));
    CHECK(waited < std::chrono::seconds(30));
    CHECK(first.find("rank 0 wait in all_reduce for rank 1, which did not come within 400 ms") !=
          std::string::npos);
    const auto again = Clock::now();
    CHECK(message_of<so::CollectiveError>([&] { comms[0].barrier(); }) == first);
    CHECK(message_of<so::CollectiveError>([&] { comms[1].barrier(); }) == first);
    CHECK(Clock::now() - again < std::chrono::milliseconds(400));  // at once
    CHECK(value == 1);
  }  // the destructors neither throw nor wait
}
