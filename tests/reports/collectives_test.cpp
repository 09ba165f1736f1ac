// SPDX-License-Identifier: Apache-2.0
// What users of such systems reported about collectives: hangs, mismatches, failing ranks, orders.
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <support/small_engine.hpp>
#include <support/watched_collective.hpp>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

using namespace test;

namespace {

using Clock = std::chrono::steady_clock;

/// Far beyond what an error takes on a busy machine under a sanitizer: who exceeds it was waiting.
constexpr double waited_seconds = 30;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

TEST_CASE("Ranks that own nothing take part like all others", "[reports][B064][host]") {
  using Optimizer = so::ZeroOptimizer<so::SGD, so::FlatSharding, Watched<HostThreads>, so::FullPrecision>;
  const std::int64_t cut = GENERATE(std::int64_t{1}, grain);
  const auto start = Clock::now();
  std::vector<std::shared_ptr<CallLog>> logs;
  for (int rank = 0; rank < 8; ++rank) logs.push_back(std::make_shared<CallLog>());
  const auto values = on_ranks(8, [&](HostThreads comm) {
    const int rank = comm.rank();
    Engine<Optimizer> engine(table_of_sizes({3 * cut}), {.groups = {{"default", {.lr = 1}}}},
                             Watched<HostThreads>(std::move(comm), logs[static_cast<std::size_t>(rank)]));
    for (int step = 0; step < 3; ++step) {
      engine.fill_gradients(1);
      engine.step({.gradient_scale = 0.125f});
    }
    return engine.values();
  });
  CHECK(seconds_since(start) < waited_seconds);
  for (const auto& rank : values) CHECK(rank == std::vector<double>(static_cast<std::size_t>(3 * cut), -3.0));
  for (const auto& log : logs) {
    REQUIRE(log->calls.size() == logs[0]->calls.size());
    for (std::size_t k = 0; k < log->calls.size(); ++k)
      CHECK(log->calls[k].operation == logs[0]->calls[k].operation);
  }
}

TEST_CASE("Collectives of nothing return and touch nothing", "[reports][B064][host]") {
  const auto buffers = on_ranks(4, [](HostThreads comm) {
    std::vector<std::int64_t> words(8, 77);
    const std::vector<std::int64_t> borders(5, 0);
    const so::BlockLayout nothing{borders};
    for (int k = 0; k < 3; ++k) {
      for (const so::Dtype type : {so::Dtype::fp32, so::Dtype::bf16, so::Dtype::fp16}) {
        comm.reduce_scatter(words.data(), nothing, type, so::Reduction::ordered, nullptr);
        comm.all_gather(words.data(), nothing, type);
        comm.reduce_scatter(nullptr, nothing, type, so::Reduction::ordered, nullptr);
        comm.all_gather(nullptr, nothing, type);
      }
      comm.all_reduce(words.data(), 0);
      comm.broadcast(words.data(), 0, 2);
      comm.exchange({}, {}, nullptr);
    }
    return words;
  });
  for (const auto& words : buffers) CHECK(words == std::vector<std::int64_t>(8, 77));
}

TEST_CASE("Ranks whose collectives differ are both told how, at once, and nothing is written",
          "[reports][B065][host]") {
  struct Case {
    const char* what;
    std::function<void(HostThreads&, std::vector<float>&, bool)> call;
    std::vector<const char*> told;
  };
  const auto blocks = [](std::int64_t each) { return std::vector<std::int64_t>{0, each, 2 * each}; };
  const std::vector<Case> cases = {
      {"counts",
       [&](HostThreads& comm, std::vector<float>& data, bool odd) {
         comm.reduce_scatter(data.data(), {blocks(odd ? 6 : 5)}, so::Dtype::fp32, so::Reduction::ordered,
                             nullptr);
       },
       {"reduce_scatter of 10", "reduce_scatter of 12"}},
      {"operations",
       [&](HostThreads& comm, std::vector<float>& data, bool odd) {
         if (odd) return comm.all_gather(data.data(), {blocks(5)}, so::Dtype::fp32);
         comm.reduce_scatter(data.data(), {blocks(5)}, so::Dtype::fp32, so::Reduction::ordered, nullptr);
       },
       {"reduce_scatter of 10", "all_gather of 10"}},
      {"types",
       [&](HostThreads& comm, std::vector<float>& data, bool odd) {
         comm.all_gather(data.data(), {blocks(5)}, odd ? so::Dtype::bf16 : so::Dtype::fp32);
       },
       {"fp32", "bf16"}},
      {"roots",
       [](HostThreads& comm, std::vector<float>& data, bool odd) {
         comm.broadcast(data.data(), 40, odd ? 1 : 0);
       },
       {"root 0", "root 1"}},
      {"blocks",
       [](HostThreads& comm, std::vector<float>& data, bool odd) {
         const std::vector<std::int64_t> borders{0, odd ? 4 : 5, 10};
         comm.all_gather(data.data(), {borders}, so::Dtype::fp32);
       },
       {"layout"}},
      {"sums",
       [](HostThreads& comm, std::vector<float>& data, bool odd) {
         std::vector<std::int64_t> words(12, 1);
         comm.all_reduce(words.data(), odd ? 12 : 10);
         data[0] = 0;
       },
       {"all_reduce of 10", "all_reduce of 12"}},
      {"messages",
       [](HostThreads& comm, std::vector<float>& data, bool odd) {
         std::vector<std::byte> mine(odd ? 12 : 10);
         std::vector<std::byte> all(24);
         comm.exchange(mine, all, nullptr);
         data[0] = 0;
       },
       {"exchange of 10", "exchange of 12"}},
  };
  for (const Case& c : cases) {
    CAPTURE(c.what);
    const auto start = Clock::now();
    std::vector<std::vector<float>> data(2, std::vector<float>(12, 3.0f));
    const auto messages = messages_of_ranks<so::CollectiveError>(2, [&](HostThreads comm) {
      const int rank = comm.rank();
      c.call(comm, data[static_cast<std::size_t>(rank)], rank == 1);
    });
    CHECK(seconds_since(start) < waited_seconds);
    for (const std::string& message : messages) {
      CAPTURE(message);
      CHECK(message.find("rank 0") != std::string::npos);
      CHECK(message.find("rank 1") != std::string::npos);
      for (const char* part : c.told) CHECK(message.find(part) != std::string::npos);
    }
    for (const auto& rank : data) CHECK(rank == std::vector<float>(12, 3.0f));
  }
}

TEST_CASE("When one rank throws, the others get its words and all threads join", "[reports][B066][host]") {
  const auto start = Clock::now();
  std::vector<std::string> seen(4);
  std::string thrown;
  try {
    HostThreads::run(4, [&](HostThreads comm) {
      const int rank = comm.rank();
      comm.barrier();
      if (rank == 2) throw std::runtime_error("no more samples");
      try {
        for (int k = 0; k < 1000; ++k) comm.barrier();
      } catch (const so::CollectiveError& error) {
        seen[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  } catch (const std::runtime_error& error) {
    thrown = error.what();
  }
  CHECK(seconds_since(start) < waited_seconds);
  CHECK(thrown == "no more samples");
  for (const int rank : {0, 1, 3}) {
    CHECK(seen[static_cast<std::size_t>(rank)].find("rank 2 failed: no more samples") != std::string::npos);
  }
}

TEST_CASE("A rank that leaves while others wait for it is an error for them", "[reports][B066][host]") {
  const auto start = Clock::now();
  const auto messages = messages_of_ranks<so::CollectiveError>(4, [](HostThreads comm) {
    comm.barrier();
    if (comm.rank() != 1) comm.barrier();
  });
  CHECK(seconds_since(start) < waited_seconds);
  CHECK(messages[1] == "");
  for (const std::size_t rank : {0U, 2U, 3U})
    CHECK(messages[rank].find("rank 1 has left while others wait for it in barrier") != std::string::npos);
}

namespace {

/// Back-to-back barriers; between two of them all ranks must see the same round.
void meet_often(int world, int rounds) {
  std::vector<int> round(static_cast<std::size_t>(world), 0);
  const auto apart = on_ranks(world, [&](HostThreads comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    const auto next = (rank + 1) % static_cast<std::size_t>(world);
    int wrong = 0;
    for (int k = 1; k <= rounds; ++k) {
      if (k % 2 != 0) round[rank] = k;
      comm.barrier();
      if (k % 2 != 0 && round[next] != k) ++wrong;
    }
    return wrong;
  });
  for (const int wrong : apart) CHECK(wrong == 0);
}

}  // namespace

TEST_CASE("Barriers can be entered again at once", "[reports][B066][host]") {
  meet_often(4, 10000);
  meet_often(64, 1000);
}

TEST_CASE("Barriers can be entered again at once, a hundred thousand times", "[reports][B066][host][full]") {
  meet_often(4, 100000);
  meet_often(64, 10000);
}

TEMPLATE_TEST_CASE("Ownership and the order of buckets are the same on all ranks and in all runs",
                   "[reports][B070][host]", so::FlatSharding, so::PerParameterSharding) {
  using Optimizer = so::ZeroOptimizer<so::AdamW, TestType, Watched<HostThreads>, so::FullPrecision>;
  class Order : public so::Observer {
   public:
    void bucket_reduced(std::int64_t bucket, std::int64_t) override { buckets.push_back(bucket); }
    std::vector<std::int64_t> buckets;
  };
  std::vector<Packed> tensors;
  for (int k = 0; k < 12; ++k)
    tensors.push_back({"layer" + std::to_string(noise(k) % 1000) + "." + std::to_string(k),
                       {1 + static_cast<std::int64_t>(noise(k, 1) % 1500)}});
  const auto table = packed_table(tensors);
  std::vector<std::string> first;
  for (int run = 0; run < 20; ++run) {
    const auto told = on_ranks(4, [&](HostThreads comm) {
      Order order;
      const int rank = comm.rank();
      Engine<Optimizer> engine(table, {.sharding = {.bucket_bytes = 5000}, .observer = &order},
                               Watched<HostThreads>(std::move(comm), std::make_shared<CallLog>()), 1.0);
      // Each rank announces in an order of its own, another in each run.
      std::vector<std::uint32_t> ids(tensors.size());
      for (std::uint32_t k = 0; k < ids.size(); ++k) ids[k] = k;
      for (std::size_t k = ids.size(); k > 1; --k) std::swap(ids[k - 1], ids[noise(61, run, rank, k) % k]);
      for (const std::uint32_t id : ids) engine.optimizer.gradient_ready(so::ParameterId{id}, {});
      engine.step();
      std::ostringstream text;
      for (const std::int64_t bucket : order.buckets) text << bucket << ' ';
      std::string owned;
      for (const auto& part : engine.optimizer.owned())
        owned += std::string(part.name) + std::to_string(part.range.begin) + "-" +
                 std::to_string(part.range.end) + " ";
      return std::pair(text.str(), owned);
    });
    std::vector<std::string> mine;
    for (const auto& [buckets, owned] : told) {
      CHECK(buckets == told[0].first);
      mine.push_back(buckets + owned);
    }
    if (first.empty()) first = mine;
    CHECK(mine == first);
  }
}

TEST_CASE("No container without an order is used in the headers", "[reports][B070][host]") {
  const auto include = std::filesystem::path(__FILE__).parent_path().parent_path().parent_path() / "include";
  REQUIRE(std::filesystem::is_directory(include));
  int files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(include)) {
    if (!entry.is_regular_file()) continue;
    ++files;
    std::ifstream stream(entry.path());
    std::stringstream text;
    text << stream.rdbuf();
    CAPTURE(entry.path().string());
    CHECK(text.str().find("unordered_") == std::string::npos);
  }
  CHECK(files > 20);
}
