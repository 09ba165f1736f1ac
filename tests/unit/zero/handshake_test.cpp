// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <shardopt/zero/handshake.hpp>
#include <support/small_engine.hpp>

#include <cstddef>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

using namespace test;

TEST_CASE("Texts are told once, with the ranks that have them", "[zero][host]") {
  using so::detail::text_by_ranks;
  CHECK(text_by_ranks({"a"}) == "rank 0: 'a'");
  CHECK(text_by_ranks({"a", "b", "a"}) == "rank 0, 2: 'a'; rank 1: 'b'");
  CHECK(text_by_ranks({"c", "b", "a"}) == "rank 0: 'c'; rank 1: 'b'; rank 2: 'a'");
}

TEST_CASE("Whatever a rank's set-up throws, the other ranks are told instead of waiting",
          "[zero][law9][host]") {
  struct Own {};
  const bool standard = GENERATE(false, true);
  std::vector<int> own(3, 0);
  const auto messages = on_ranks(3, [&](HostThreads comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    std::vector<std::byte> scratch(3 * so::detail::handshake_bytes);
    try {
      so::detail::set_up(comm, [&] {
        if (rank == 1 && standard) throw std::runtime_error("no such tensor");
        if (rank == 1) throw Own{};
      });
      so::detail::Setup().require_agreement(comm, scratch.data());
    } catch (const std::exception& error) {
      return std::string(error.what());
    } catch (const Own&) {
      own[rank] = 1;
    }
    return std::string();
  });
  CHECK(own == std::vector<int>{0, standard ? 0 : 1, 0});
  if (standard) CHECK(messages[1] == "no such tensor");
  for (const std::size_t other : {0U, 2U})
    CHECK(messages[other] == std::string("shardopt: rank 1 could not be set up: ") +
                                 (standard ? "no such tensor" : "an exception that is no std::exception"));
}

TEST_CASE("The first line that differs is found wherever it stands", "[zero][law6][host]") {
  const int lines = GENERATE(1, 2, 3, 7, 64, 100);
  for (const int odd_line : {0, 1, lines / 2, lines - 1}) {
    if (odd_line >= lines) continue;
    CAPTURE(lines, odd_line);
    const auto messages = messages_of_ranks<so::CollectiveError>(3, [&](HostThreads comm) {
      so::detail::Setup setup;
      const bool odd = comm.rank() == 2;
      for (int k = 0; k < lines; ++k)
        setup.add("line " + std::to_string(k) + (odd && k >= odd_line ? " is odd" : ""));
      std::vector<std::byte> scratch(3 * so::detail::handshake_bytes);
      setup.require_agreement(comm, scratch.data());
    });
    REQUIRE(all_same(messages));
    const std::string line = "line " + std::to_string(odd_line);
    CHECK(messages[0].find("rank 0, 1: '" + line + "'; rank 2: '" + line + " is odd'") != std::string::npos);
  }
}

TEST_CASE("A line that is too long for one message still shows the difference at its end",
          "[zero][law6][host]") {
  const auto messages = messages_of_ranks<so::CollectiveError>(2, [](HostThreads comm) {
    so::detail::Setup setup;
    setup.add(std::string(1000, 'x') + (comm.rank() == 0 ? "first" : "second"));
    std::vector<std::byte> scratch(2 * so::detail::handshake_bytes);
    setup.require_agreement(comm, scratch.data());
  });
  REQUIRE(all_same(messages));
  CAPTURE(messages[0]);
  CHECK(messages[0].find("first'") != std::string::npos);
  CHECK(messages[0].find("second'") != std::string::npos);
}
