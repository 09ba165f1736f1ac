// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_test_macros.hpp>
#include <shardopt/collectives/collective.hpp>
#include <shardopt/collectives/solo.hpp>
#include <shardopt/collectives/threads.hpp>
#include <support/small_engine.hpp>
#include <support/watched_collective.hpp>

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

using namespace test;

namespace {

/// The least that models Collective: one rank.
struct Minimal {
  using Device = so::Host;
  static constexpr std::string_view name = "minimal";
  [[nodiscard]] int rank() const { return 0; }
  [[nodiscard]] int world() const { return 1; }
  [[nodiscard]] so::Host::Stream stream() const { return {}; }
  [[nodiscard]] so::Host device() const { return {}; }
  [[nodiscard]] static bool supports(so::Reduction, so::Dtype) { return true; }
  [[nodiscard]] static so::Reduction automatic_reduction(so::Dtype) { return so::Reduction::ordered; }
  [[nodiscard]] static std::int64_t workspace_bytes(so::Reduction, so::BlockLayout, so::Dtype, int) {
    return 100;
  }
  void reduce_scatter(void*, so::BlockLayout, so::Dtype, so::Reduction, void*) {}
  void all_gather(void*, so::BlockLayout, so::Dtype) {}
  void all_reduce(std::int64_t*, std::int64_t) {}
  void broadcast(void*, std::int64_t, int) {}
  void exchange(std::span<const std::byte> mine, std::span<std::byte> all, void*) {
    std::copy(mine.begin(), mine.end(), all.begin());
  }
};
static_assert(so::Collective<Minimal>);
static_assert(so::Collective<HostThreads>);
static_assert(so::Collective<so::Solo<so::Host>>);
static_assert(so::Collective<Watched<HostThreads>>);

struct WithoutDevice : Minimal {
  using Device = void;
};
struct WithoutName : Minimal {
  static constexpr int name = 0;
};
struct RankIsNotConst : Minimal {
  [[nodiscard]] int rank() { return 0; }
};
struct StreamOfAnotherDevice : Minimal {
  [[nodiscard]] int stream() const { return 0; }
};
struct SupportsNeedsAnObject : Minimal {
  [[nodiscard]] bool supports(so::Reduction, so::Dtype) const { return true; }
};
struct WorkspaceOfInt : Minimal {
  [[nodiscard]] static int workspace_bytes(so::Reduction, so::BlockLayout, so::Dtype, int) { return 0; }
};
struct WithoutGather : Minimal {
  void all_gather() {}
};
struct SumsOfFloats : Minimal {
  void all_reduce(float*, std::int64_t) {}
};
struct CannotBeMoved : Minimal {
  CannotBeMoved() = default;
  CannotBeMoved(CannotBeMoved&&) = delete;
};
static_assert(!so::Collective<RankIsNotConst>);
static_assert(!so::Collective<WithoutName>);
static_assert(!so::Collective<StreamOfAnotherDevice>);
static_assert(!so::Collective<SupportsNeedsAnObject>);
static_assert(!so::Collective<WorkspaceOfInt>);
static_assert(!so::Collective<WithoutGather>);
static_assert(!so::Collective<SumsOfFloats>);
static_assert(!so::Collective<CannotBeMoved>);
static_assert(!so::Collective<int>);

}  // namespace

TEST_CASE("The least collective trains, and its workspace is planned", "[collectives][host]") {
  using Optimizer = so::ZeroOptimizer<so::SGD, so::FlatSharding, Minimal, so::FullPrecision>;
  const auto table = table_of_sizes({300});
  CHECK(Optimizer::plan(table, {}, {}).workspace_bytes == 100);
  Engine<Optimizer> engine(table, {.groups = {{"default", {.lr = 1}}}}, Minimal{}, 1.0);
  engine.fill_gradients(0.5);
  engine.step();
  CHECK(engine.values() == std::vector<double>(300, 0.5));
}

TEST_CASE("A step makes one reduction and one gather a bucket, and one small sum", "[collectives][host]") {
  using Optimizer = so::ZeroOptimizer<so::AdamW, so::FlatSharding, Watched<HostThreads>, so::FullPrecision>;
  const auto calls = on_ranks(2, [](HostThreads comm) {
    const auto log = std::make_shared<CallLog>();
    Engine<Optimizer> engine(table_of_sizes({2000, 0, 40}), {.sharding = {.bucket_bytes = 1}},
                             Watched<HostThreads>(std::move(comm), log), 1.0);
    log->calls.clear();
    engine.step();
    // Buckets of 512: four, the last of which is shorter and comes first.
    std::vector<std::int64_t> seen{log->count("reduce_scatter"), log->count("all_gather"),
                                   log->count("all_reduce"),     log->count("exchange"),
                                   log->count("broadcast"),      static_cast<std::int64_t>(log->calls.size()),
                                   log->calls[0].elements,       log->calls[1].elements};
    return seen;
  });
  for (const auto& seen : calls) CHECK(seen == std::vector<std::int64_t>{4, 4, 1, 0, 0, 9, 504, 512});
}

TEST_CASE("A block layout knows its blocks and whether they are alike", "[collectives][host]") {
  const std::vector<std::int64_t> equal{0, 4, 8};
  const std::vector<std::int64_t> unequal{0, 4, 4, 9};
  CHECK(so::BlockLayout{equal}.uniform());
  CHECK(so::BlockLayout{equal}.world() == 2);
  CHECK_FALSE(so::BlockLayout{unequal}.uniform());
  CHECK(so::BlockLayout{unequal}.elements() == 9);
  CHECK(so::BlockLayout{unequal}.block(1).empty());
  CHECK(so::BlockLayout{unequal}.block(2) == so::Range{4, 9});
}
