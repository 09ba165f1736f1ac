// SPDX-License-Identifier: Apache-2.0
// What users of such systems reported about how often, in which width and in which order gradients are
// reduced.
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <shardopt/shardopt.hpp>
#include <support/message_of.hpp>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <exception>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace so = shardopt;
using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;

namespace {

/// Threads whose reductions are counted.
class CountingThreads {
 public:
  using Device = so::Host;
  static constexpr std::string_view name = "counting threads";

  CountingThreads(so::Threads<so::Host> inner, std::atomic<int>& reductions)
      : inner_(std::move(inner)), reductions_(&reductions) {}
  [[nodiscard]] int rank() const { return inner_.rank(); }
  [[nodiscard]] int world() const { return inner_.world(); }
  [[nodiscard]] so::Host::Stream stream() const { return {}; }
  [[nodiscard]] so::Host device() const { return inner_.device(); }
  [[nodiscard]] static bool supports(so::Reduction r, so::Dtype t) {
    return so::Threads<so::Host>::supports(r, t);
  }
  [[nodiscard]] static so::Reduction automatic_reduction(so::Dtype) { return so::Reduction::ordered; }
  [[nodiscard]] static std::int64_t workspace_bytes(so::Reduction, so::BlockLayout, so::Dtype, int) {
    return 0;
  }
  void reduce_scatter(void* base, so::BlockLayout blocks, so::Dtype type, so::Reduction reduction,
                      void* workspace) {
    ++*reductions_;
    inner_.reduce_scatter(base, blocks, type, reduction, workspace);
  }
  void all_gather(void* base, so::BlockLayout blocks, so::Dtype type) {
    inner_.all_gather(base, blocks, type);
  }
  void all_reduce(std::int64_t* values, std::int64_t count) { inner_.all_reduce(values, count); }
  void broadcast(void* data, std::int64_t bytes, int root) { inner_.broadcast(data, bytes, root); }
  void exchange(std::span<const std::byte> mine, std::span<std::byte> all, void* scratch) {
    inner_.exchange(mine, all, scratch);
  }

 private:
  so::Threads<so::Host> inner_;
  std::atomic<int>* reductions_;
};
static_assert(so::Collective<CountingThreads>);

so::ParameterTable table_of(std::int64_t elements) {
  so::ParameterTable table;
  table.add({.name = "a", .shape = {elements}, .offset = 0});
  table.add({.name = "b", .shape = {elements}, .offset = elements});
  return table;
}

template <class Precision>
using SgdIn = so::ZeroOptimizer<so::SGD, so::FlatSharding, so::Threads<so::Host>, Precision>;

/// Minus the parameter after one step of SGD from 0 at learning rate 1: the gradient as the update saw it.
template <class Precision>
std::vector<float> gradient_seen(const std::vector<double>& by_rank, float scale, bool scale_in_memory) {
  using Param = typename Precision::Param;
  using Grad = typename Precision::Grad;
  constexpr std::int64_t elements = 700;
  std::vector<float> seen(by_rank.size());
  so::Threads<so::Host>::run(static_cast<int>(by_rank.size()), [&](so::Threads<so::Host> comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    std::vector<Param> parameters(2 * elements, so::from_float<Param>(0.0f));
    std::vector<Grad> gradients(2 * elements, so::from_float<Grad>(static_cast<float>(by_rank[rank])));
    SgdIn<Precision> optimizer(table_of(elements),
                               {.groups = {{"default", {.lr = 1.0}}}, .sharding = {.bucket_bytes = 1024}},
                               std::move(comm), so::FlatBuffers{parameters.data(), gradients.data()}, {});
    const so::GradientScale given = scale_in_memory ? so::GradientScale(&scale) : so::GradientScale(scale);
    static_cast<void>(optimizer.step({.gradient_scale = given}, {}));
    optimizer.wait_parameters({});
    seen[rank] = -so::to_float(parameters[static_cast<std::size_t>(elements) + rank]);
  });
  return seen;
}

}  // namespace

TEST_CASE(
    "A bucket is reduced once a step, whether it is announced or not, and the sum is divided by what the "
    "engine says",
    "[reports][B060][host]") {
  const int world = GENERATE(2, 4);
  const bool announced = GENERATE(false, true);
  CAPTURE(world, announced);
  constexpr std::int64_t elements = 3000;
  std::atomic<int> reductions{0};
  std::vector<float> sums(static_cast<std::size_t>(world));
  std::vector<float> parameters_seen(static_cast<std::size_t>(world));
  std::size_t buckets = 0;
  so::Threads<so::Host>::run(world, [&](so::Threads<so::Host> comm) {
    const int rank = comm.rank();
    std::vector<float> parameters(2 * elements, 0.0f);
    std::vector<float> gradients(2 * elements, static_cast<float>(rank + 1));
    using Optimizer = so::ZeroOptimizer<so::SGD, so::FlatSharding, CountingThreads, so::FullPrecision>;
    const Optimizer::Config config{.groups = {{"default", {.lr = 1.0}}}, .sharding = {.bucket_bytes = 8192}};
    Optimizer optimizer(table_of(elements), config, CountingThreads(std::move(comm), reductions),
                        so::FlatBuffers{parameters.data(), gradients.data()}, {});
    if (announced) {
      optimizer.gradient_ready(so::ParameterId{0}, {});
      optimizer.gradient_ready(so::ParameterId{1}, {});
    }
    static_cast<void>(optimizer.step({.gradient_scale = 1.0f / static_cast<float>(world)}, {}));
    optimizer.wait_parameters({});
    const so::OwnedPart part = optimizer.owned().front();
    const std::int64_t first = part.range.begin + (part.name == "b" ? elements : 0);
    sums[static_cast<std::size_t>(rank)] = gradients[static_cast<std::size_t>(first)];
    parameters_seen[static_cast<std::size_t>(rank)] = parameters.back();
    if (rank == 0) {
      const std::int64_t bucket = so::round_up(8192 / 4, world * so::grain_elements);
      buckets = static_cast<std::size_t>((2 * elements + bucket - 1) / bucket);
    }
  });
  CHECK(reductions == world * static_cast<int>(buckets));
  const float sum = static_cast<float>(world * (world + 1)) / 2.0f;
  for (const float value : sums) CHECK(value == sum);
  for (const float value : parameters_seen)
    CHECK(value == -sum / static_cast<float>(world));  // 1.5 of two ranks, 2.5 of four
}

TEMPLATE_TEST_CASE("A scale is taken in its own width, from a value and from memory", "[reports][B062][host]",
                   so::FullPrecision, (so::Mixed<so::bf16, so::bf16, float>),
                   (so::Mixed<so::fp16, so::fp16, float>)) {
  const float factor = GENERATE(0.5f, 1.0f / 3.0f, 2.0f, 5.0f);
  const bool in_memory = GENERATE(false, true);
  CAPTURE(factor, in_memory);
  constexpr so::Dtype type = so::dtype_of<typename TestType::Param>;
  const double digits = type == so::Dtype::fp32 ? 0x1p-23 : type == so::Dtype::fp16 ? 0x1p-10 : 0x1p-7;
  for (const float seen : gradient_seen<TestType>({1, 3}, factor, in_memory)) {
    CHECK(std::abs(static_cast<double>(seen) - 4.0 * static_cast<double>(factor)) <=
          4.0 * static_cast<double>(factor) * digits);
  }
}

TEST_CASE("Sums beyond the range of fp16, and tiny ones, are exact with fp32 gradients",
          "[reports][B063][host]") {
  using Precision = so::Mixed<so::fp16, float, float>;
  for (const float seen : gradient_seen<Precision>({30000, 30000, 30000, 30000}, 0.25f, false))
    CHECK(seen == 30000.0f);
  for (const float seen : gradient_seen<Precision>(std::vector<double>(8, 0x1p-24), 0.125f, false))
    CHECK(seen == 0x1p-24f);
  for (const float seen : gradient_seen<Precision>({60000, -60000, 1, 1}, 0.25f, false)) CHECK(seen == 0.5f);
}

TEST_CASE(
    "fp16 gradients are summed in fp32: tiny ones and such that cancel are exact, a sum beyond fp16 is "
    "skipped",
    "[reports][B063][host]") {
  using Precision = so::Mixed<so::fp16, so::fp16, float>;
  for (const float seen : gradient_seen<Precision>(std::vector<double>(8, 0x1p-24), 0.125f, false))
    CHECK(seen == 0x1p-24f);
  for (const float seen : gradient_seen<Precision>({60000, -60000, 1, 1}, 0.25f, false)) CHECK(seen == 0.5f);
  // On the way to the sum nothing overflows, in whatever order.
  for (const float seen : gradient_seen<Precision>({60000, 60000, -60000, -59968}, 0.25f, false))
    CHECK(seen == 8.0f);
  // The sum of four times 30000 does not fit in fp16, where it is kept: the documented limit.
  for (const float seen : gradient_seen<Precision>(std::vector<double>(4, 30000), 0.25f, false))
    CHECK(seen == 0.0f);
}

namespace {

/// Runs body(rank) on a thread for each of four ranks. @return the message of what each threw
template <class Body>
std::vector<std::string> told_to_four(const Body& body) {
  std::vector<std::string> texts(4);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < texts.size(); ++rank)
    threads.emplace_back([&, rank] { texts[rank] = test::message_of([&] { body(rank); }); });
  for (std::thread& thread : threads) thread.join();
  return texts;
}

}  // namespace

TEST_CASE("Ranks that use two collectives in different orders are told who waits where",
          "[reports][B068][host]") {
  auto first = so::Threads<so::Host>::make(4, 300ms);  // gives up while the others still wait
  auto second = so::Threads<so::Host>::make(4, 1500ms);
  const auto texts = told_to_four([&](std::size_t rank) {
    std::int64_t value = 1;
    auto& one = rank < 2 ? first[rank] : second[rank];
    auto& other = rank < 2 ? second[rank] : first[rank];
    one.all_reduce(&value, 1);
    other.barrier();
  });
  for (const std::string& text : texts) {
    CHECK_THAT(text, ContainsSubstring("wait in all_reduce for rank") &&
                         ContainsSubstring("which did not come within"));
  }
  CHECK_THAT(texts[0], ContainsSubstring("rank 0, 1 wait in all_reduce for rank 2, 3") &&
                           ContainsSubstring("elsewhere rank 2, 3 wait in all_reduce for rank 0, 1"));
  CHECK_THAT(texts[2], ContainsSubstring("rank 2, 3 wait in all_reduce for rank 0, 1"));
}

TEST_CASE("Two optimizers on two communicators, stepped in different orders, are told who waits where",
          "[reports][B068][host]") {
  auto first = so::Threads<so::Host>::make(4, 3s);  // gives up while the others still wait
  auto second = so::Threads<so::Host>::make(4, 60s);
  const auto texts = told_to_four([&](std::size_t rank) {
    std::vector<float> values(80, 0.0f);
    const auto buffers = [&](std::size_t at) { return so::FlatBuffers{&values[at], &values[at + 20]}; };
    SgdIn<so::FullPrecision> one(table_of(10), {}, std::move(first[rank]), buffers(0), {});
    SgdIn<so::FullPrecision> other(table_of(10), {}, std::move(second[rank]), buffers(40), {});
    auto& now = rank < 2 ? one : other;
    auto& then = rank < 2 ? other : one;
    static_cast<void>(now.step({}, {}));
    static_cast<void>(then.step({}, {}));
  });
  for (const std::size_t rank : {0U, 1U}) {
    CHECK_THAT(texts[rank],
               ContainsSubstring("rank 0, 1 wait in reduce_scatter for rank 2, 3") &&
                   ContainsSubstring("elsewhere rank 2, 3 wait in reduce_scatter for rank 0, 1"));
  }
  for (const std::size_t rank : {2U, 3U}) CHECK_THAT(texts[rank], ContainsSubstring("in reduce_scatter"));
}

TEST_CASE("Two optimizers on two communicators, stepped in one order, never wait for ever",
          "[reports][B068][host]") {
  constexpr int rounds = 1000;
  auto first = so::Threads<so::Host>::make(4, 60s);
  auto second = so::Threads<so::Host>::make(4, 60s);
  std::vector<float> last(4);
  const auto texts = told_to_four([&](std::size_t rank) {
    std::vector<float> values(80, 0.0f);
    const auto buffers = [&](std::size_t at) { return so::FlatBuffers{&values[at], &values[at + 20]}; };
    SgdIn<so::FullPrecision> one(table_of(10), {.groups = {{"default", {.lr = 1}}}}, std::move(first[rank]),
                                 buffers(0), {});
    SgdIn<so::FullPrecision> other(table_of(10), {.groups = {{"default", {.lr = 1}}}},
                                   std::move(second[rank]), buffers(40), {});
    for (int round = 0; round < rounds; ++round) {
      values[39] = values[79] = 0.25f;
      static_cast<void>(one.step({}, {}));
      static_cast<void>(other.step({}, {}));
    }
    last[rank] = values[19] + values[59];
  });
  CHECK(texts == std::vector<std::string>(4));
  CHECK(last == std::vector<float>(4, -2.0f * rounds));
}

TEST_CASE("Two optimizers over the same ranks, used in one order, never wait for ever",
          "[reports][B068][host]") {
  constexpr int rounds = 1000;
  so::Threads<so::Host>::run(
      4,
      [&](so::Threads<so::Host> comm) {
        std::vector<float> parameters(20, 0.0f);
        std::vector<float> gradients(20, 1.0f);
        using Optimizer = SgdIn<so::FullPrecision>;
        const so::FlatBuffers buffers{parameters.data(), gradients.data()};
        Optimizer one(table_of(10), {}, comm.borrow(), buffers, {});
        Optimizer other(table_of(10), {}, comm.borrow(), buffers, {});
        for (int round = 0; round < rounds; ++round) {
          static_cast<void>(one.step({}, {}));
          static_cast<void>(other.step({}, {}));
        }
      },
      10s);
  SUCCEED();
}
