// SPDX-License-Identifier: Apache-2.0
#include <shardopt/collectives/bootstrap.hpp>
#include <shardopt/collectives/process_place.hpp>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace so = shardopt;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;

namespace {

/// Sets variables, and takes them away at the end.
class Variables {
 public:
  explicit Variables(std::vector<std::pair<std::string, std::string>> values) : values_(std::move(values)) {
    for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID",
                             "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_NODELIST",
                             "OMPI_COMM_WORLD_RANK", "TORCHELASTIC_USE_AGENT_STORE"}) {
      unsetenv(name);
    }
    for (const auto& [name, value] : values_) setenv(name.c_str(), value.c_str(), 1);
  }
  ~Variables() {
    for (const auto& [name, value] : values_) unsetenv(name.c_str());
  }
  Variables(const Variables&) = delete;
  Variables& operator=(const Variables&) = delete;

 private:
  std::vector<std::pair<std::string, std::string>> values_;
};

int free_port() {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const so::detail::Socket socket(::socket(AF_INET, SOCK_STREAM, 0));
  socklen_t size = sizeof address;
  REQUIRE(::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), size) == 0);
  REQUIRE(::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0);
  return ntohs(address.sin_port);
}

std::string failure_of(const so::ProcessPlace& place, std::chrono::milliseconds deadline) {
  int value = 0;
  try {
    so::share_from_rank_0(place, value, deadline);
  } catch (const so::Error& error) {
    return error.what();
  }
  return "nothing failed";
}

}  // namespace

TEST_CASE("a process finds its place in what torchrun, Open MPI and srun set", "[collectives][host]") {
  SECTION("none") {
    const Variables variables({});
    CHECK_FALSE(so::ProcessPlace::from_environment());
  }
  SECTION("torchrun") {
    const Variables variables({{"RANK", "5"},
                               {"WORLD_SIZE", "8"},
                               {"LOCAL_RANK", "1"},
                               {"MASTER_ADDR", "10.0.0.1"},
                               {"MASTER_PORT", "1234"}});
    const auto place = so::ProcessPlace::from_environment();
    REQUIRE(place);
    CHECK(place->rank == 5);
    CHECK(place->world == 8);
    CHECK(place->local_rank == 1);
    CHECK(place->address == "10.0.0.1");
    CHECK(place->port == 1234);
    const Variables agent({{"RANK", "0"},
                           {"WORLD_SIZE", "1"},
                           {"MASTER_PORT", "1234"},
                           {"TORCHELASTIC_USE_AGENT_STORE", "True"}});
    CHECK(so::ProcessPlace::from_environment()->port == 1235);  // torchrun itself is at the other
    setenv("MASTER_PORT", "65535", 1);
    CHECK(so::ProcessPlace::from_environment()->port == 65534);
  }
  SECTION("Open MPI") {
    const Variables variables(
        {{"OMPI_COMM_WORLD_RANK", "3"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "3"}});
    const auto place = so::ProcessPlace::from_environment();
    REQUIRE(place);
    CHECK(place->rank == 3);
    CHECK(place->local_rank == 3);
    CHECK(place->address.empty());
  }
  SECTION("srun") {
    const Variables variables({{"SLURM_PROCID", "2"},
                               {"SLURM_NTASKS", "16"},
                               {"SLURM_LOCALID", "2"},
                               {"SLURM_JOB_ID", "123456"},
                               {"SLURM_STEP_NODELIST", "n[007-8,12]"}});
    const auto place = so::ProcessPlace::from_environment();
    REQUIRE(place);
    CHECK(place->rank == 2);
    CHECK(place->world == 16);
    CHECK(place->address == "n007");
    CHECK(place->port == 20000 + 123456 % 20000);
    setenv("SLURM_JOB_ID", "2281701377", 1);  // of a federation
    CHECK(so::ProcessPlace::from_environment()->port == 20000 + 2281701377 % 20000);
  }
}

TEST_CASE("the first of SLURM's hosts is read from every form of its list", "[collectives][host]") {
  CHECK(so::detail::first_host("a") == "a");
  CHECK(so::detail::first_host("a,b") == "a");
  CHECK(so::detail::first_host("gpu[3-5]") == "gpu3");
  CHECK(so::detail::first_host("gpu[03,05]") == "gpu03");
  CHECK(so::detail::first_host("rack[1-2].site,x") == "rack1.site");
  CHECK(so::detail::first_host("rack[0-1]node[3,5],x[1]") == "rack0node3");
  CHECK(so::detail::first_host("broken[3") == "broken3");
  CHECK(so::detail::first_host("") == "");
}

TEST_CASE("a variable that makes no sense is named", "[collectives][host]") {
  const auto [name, value] = GENERATE(table<std::string, std::string>({{"RANK", "8"},
                                                                       {"RANK", "-1"},
                                                                       {"RANK", "x"},
                                                                       {"WORLD_SIZE", "0"},
                                                                       {"LOCAL_RANK", "9"},
                                                                       {"MASTER_PORT", "70000"}}));
  CAPTURE(name, value);
  const Variables variables({{"RANK", "1"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}, {"MASTER_PORT", "1"}});
  setenv(name.c_str(), value.c_str(), 1);
  CHECK_THROWS_WITH(so::ProcessPlace::from_environment(), ContainsSubstring(name));
}

TEST_CASE("a process among several that is not told its rank is no world of its own", "[collectives][host]") {
  const std::string world = GENERATE("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE");
  {
    const Variables variables({{world, "4"}, {"LOCAL_RANK", "2"}});
    CHECK_THROWS_WITH(so::ProcessPlace::from_environment(),
                      ContainsSubstring(world) && ContainsSubstring("RANK"));
  }
  {
    const Variables variables({{world, "1"}});
    CHECK_FALSE(so::ProcessPlace::from_environment());
  }
  // A script for torchrun that srun runs.
  const Variables variables({{world, "4"}, {"SLURM_PROCID", "3"}, {"SLURM_NTASKS", "4"}});
  CHECK(so::ProcessPlace::from_environment()->rank == 3);
}

TEST_CASE("a place that cannot be is refused", "[collectives][host][law9]") {
  const so::ProcessPlace place = GENERATE(
      so::ProcessPlace{.rank = 0, .world = 0}, so::ProcessPlace{.rank = 2, .world = 2},
      so::ProcessPlace{.rank = -1, .world = 2}, so::ProcessPlace{.rank = 0, .world = 2, .port = 70000});
  int value = 0;
  CHECK_THROWS_AS(so::share_from_rank_0(place, value, 1s), std::invalid_argument);
  CHECK_THROWS_AS(so::share_from_rank_0({.rank = 0, .world = 2, .port = free_port()}, value,
                                        std::chrono::milliseconds::min()),
                  so::CollectiveError);
}

TEST_CASE("two calls in a row bring each rank both, though one is late", "[collectives][host]") {
  constexpr int world = 3;
  const int port = free_port();
  std::vector<std::array<int, 2>> values(world);
  values[0] = {42, 43};
  std::vector<std::string> failed(world);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      const auto k = static_cast<std::size_t>(rank);
      const so::ProcessPlace place{.rank = rank, .world = world, .address = "127.0.0.1", .port = port};
      if (rank == 2) std::this_thread::sleep_for(300ms);
      try {
        for (int& value : values[k]) so::share_from_rank_0(place, value, 20s);
      } catch (const std::exception& error) {
        failed[k] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& text : failed) CHECK(text == "");
  for (const auto& value : values) CHECK(value == std::array{42, 43});
}

TEST_CASE("what another service answers is not taken for rank 0's bytes", "[collectives][host]") {
  const int port = free_port();
  const so::detail::Socket listener = so::detail::listen_at(port);
  std::atomic<bool> done = false;
  std::thread stranger([&] {
    const std::string banner(200, 'B');
    while (!done) {
      if (!listener.wait(POLLIN, so::detail::BootstrapClock::now() + 20ms)) continue;
      const so::detail::Socket peer(::accept(listener.get(), nullptr, nullptr));
      static_cast<void>(::send(peer.get(), banner.data(), banner.size(), MSG_NOSIGNAL));
    }
  });
  CHECK_THAT(failure_of({.rank = 1, .world = 2, .address = "127.0.0.1", .port = port}, 300ms),
             ContainsSubstring("has not reached rank 0"));
  done = true;
  stranger.join();
}

TEST_CASE("ranks that share objects of different sizes are told so", "[collectives][host]") {
  const int port = free_port();
  std::string told;
  std::thread other([&] {
    std::array<int, 7> value{};
    try {
      so::share_from_rank_0({.rank = 1, .world = 2, .address = "127.0.0.1", .port = port}, value, 2s);
    } catch (const so::Error&) {
      // Rank 0 has gone.
    }
  });
  try {
    std::array<int, 2> value{};
    so::share_from_rank_0({.rank = 0, .world = 2, .port = port}, value, 20s);
  } catch (const so::CollectiveError& error) {
    told = error.what();
  }
  other.join();
  CHECK_THAT(told, ContainsSubstring("rank 0 shares 8 bytes, rank 1 asks for 28"));
}

TEST_CASE("rank 0's bytes reach all ranks, strangers or not", "[collectives][host]") {
  const int world = GENERATE(1, 2, 7);
  const int port = free_port();
  std::vector<std::array<int, 32>> values(static_cast<std::size_t>(world));
  values[0].fill(42);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      if (rank == 0) std::this_thread::sleep_for(30ms);
      so::share_from_rank_0({.rank = rank, .world = world, .address = "127.0.0.1", .port = port},
                            values[static_cast<std::size_t>(rank)], 20s);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& value : values) CHECK(value[31] == 42);
}

TEST_CASE("who does not come before the deadline is named", "[collectives][host][B067]") {
  const int port = free_port();
  CHECK_THAT(failure_of({.rank = 0, .world = 3, .address = "127.0.0.1", .port = port}, 200ms),
             ContainsSubstring("in vain for rank 1, 2"));
  CHECK_THAT(failure_of({.rank = 2, .world = 3, .address = "127.0.0.1", .port = port}, 200ms),
             ContainsSubstring("rank 2 has not reached rank 0 at 127.0.0.1:" + std::to_string(port)));
}

TEST_CASE("an address that never answers holds nobody up beyond the deadline", "[collectives][host][B067]") {
  // A listener whose queue is full drops what asks to connect: the system would try for minutes.
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  const so::detail::Socket listener(::socket(AF_INET, SOCK_STREAM, 0));
  REQUIRE(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), size) == 0);
  REQUIRE(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0);
  REQUIRE(::listen(listener.get(), 0) == 0);
  std::vector<so::detail::Socket> waiting;
  for (int k = 0; k < 4; ++k) {
    waiting.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
    static_cast<void>(::connect(waiting.back().get(), reinterpret_cast<sockaddr*>(&address), size));
  }
  const int port = ntohs(address.sin_port);
  const auto start = std::chrono::steady_clock::now();
  CHECK_THAT(failure_of({.rank = 1, .world = 2, .address = "127.0.0.1", .port = port}, 300ms),
             ContainsSubstring("rank 1 has not reached rank 0"));
  CHECK(std::chrono::steady_clock::now() - start < 20s);
}

TEST_CASE("the longest deadline is no overflow", "[collectives][host]") {
  const int port = free_port();
  std::array<int, 2> values{7, 0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      so::share_from_rank_0({.rank = rank, .world = 2, .address = "127.0.0.1", .port = port},
                            values[static_cast<std::size_t>(rank)], std::chrono::milliseconds::max());
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(values[1] == 7);
}

TEST_CASE("ranks that disagree about the world, or share a rank, are told so", "[collectives][host]") {
  const int port = free_port();
  const so::ProcessPlace other =
      GENERATE(so::ProcessPlace{.rank = 1, .world = 4}, so::ProcessPlace{.rank = 1, .world = 3});
  std::string text;
  std::thread first(
      [&] { text = failure_of({.rank = 0, .world = 3, .address = "127.0.0.1", .port = port}, 30s); });
  std::vector<std::thread> others;
  for (int k = 0; k < 2; ++k) {
    others.emplace_back([&] {
      failure_of({.rank = other.rank, .world = other.world, .address = "127.0.0.1", .port = port}, 4s);
    });
  }
  first.join();
  for (std::thread& thread : others) thread.join();
  CHECK_THAT(text, ContainsSubstring(other.world == 4 ? "rank 1 of 4 has come"
                                                      : "two processes call themselves rank 1"));
}
