// SPDX-License-Identifier: Apache-2.0
#include "sharded_adamw.cuh"

#include <catch2/catch_test_macros.hpp>

using namespace test;

namespace {

// nvcc remarks that the host's form of the rule is not used in this file.
#pragma nv_diag_suppress 177

/// A rule in an unnamed namespace, without names and state.
struct Halve {
  float lr = 1.0f;
  template <class V>
  struct State {};
  struct Constants {
    float lr;
  };
  [[nodiscard]] SHARDOPT_HD Constants constants(so::StepScalars s) const {
    return {so::math::mul(lr, s.lr_factor)};
  }
  template <class V>
  [[nodiscard]] SHARDOPT_RULE static V update(Constants c, V param, V grad, State<V>&) {
    return so::math::fma(so::math::neg(c.lr), grad, so::math::mul(V(0.5f), param));
  }
};

/// Everything in one bucket, which the last rank owns.
struct Last {
  static constexpr std::string_view name = "last";
  static constexpr bool updates_everything = false;
  [[nodiscard]] so::ShardPlan plan(const so::FlatSpace& space, int world, std::int64_t) const {
    if (space.elements == 0) return {};
    return {.buckets = {{0, space.elements}}, .runs = {{{0, space.elements}, world - 1}}};
  }
};

}  // namespace

TEST_CASE("Rules and policies may be types that only one file knows", "[zero][cuda][B098]") {
  require_devices(2);
  using Optimizer = so::ZeroOptimizer<Halve, Last, so::Nccl, so::Mixed<__nv_bfloat16, float, float>>;
  const Communicators comms(2);
  std::vector<float> got[2];
  on_ranks(2, [&](int rank) {
    const OwnStream compute;
    const OwnStream communication;
    const OwnMemory<std::uint16_t> parameters(10);
    const OwnMemory<float> gradients(10);
    parameters.write(std::vector<std::uint16_t>(10, 0x4000), compute);  // 2
    gradients.write(std::vector<float>(10, rank == 0 ? 0.5f : 1.5f), compute);
    so::ParameterTable table;
    table.add({.name = "a", .shape = {4}, .offset = 0});
    table.add({.name = "b", .shape = {5}, .offset = 5});
    Optimizer optimizer(table, {}, so::Nccl::borrow(comms[rank], communication),
                        so::FlatBuffers<__nv_bfloat16, float>{
                            reinterpret_cast<__nv_bfloat16*>(parameters.data()), gradients.data()},
                        compute);
    static_cast<void>(optimizer.step({.gradient_scale = 0.25f}, compute));
    optimizer.wait_parameters(compute);
    for (const std::uint16_t bits : parameters.read(compute))
      got[rank].push_back(so::to_float(so::bf16{bits}));
  });
  const std::vector<float> expected{0.5f, 0.5f, 0.5f, 0.5f, 2.0f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f};
  CHECK(got[0] == expected);
  CHECK(got[1] == expected);
}

namespace {

/// Gives everything to the rank that a function names.
template <class Owner>
struct GivenBy {
  static constexpr std::string_view name = "given by a function";
  static constexpr bool updates_everything = false;
  [[nodiscard]] so::ShardPlan plan(const so::FlatSpace& space, int world, std::int64_t) const {
    return {.buckets = {{0, space.elements}}, .runs = {{{0, space.elements}, Owner{}(world)}}};
  }
};

template <class Sharding>
std::vector<float> halved_by() {
  using Optimizer = so::ZeroOptimizer<Halve, Sharding, so::Solo<so::Cuda>, so::FullPrecision>;
  const OwnStream stream;
  const OwnMemory<float> parameters(300);
  const OwnMemory<float> gradients(300);
  parameters.write(std::vector<float>(300, 4.0f), stream);
  gradients.write(std::vector<float>(300, 1.5f), stream);
  so::ParameterTable table;
  table.add({.name = "a", .shape = {300}, .offset = 0});
  Optimizer optimizer(table, {}, so::Solo<so::Cuda>(stream),
                      so::FlatBuffers<float, float>{parameters.data(), gradients.data()}, stream);
  static_cast<void>(optimizer.step({}, stream));
  optimizer.wait_parameters(stream);
  return parameters.read(stream);
}

class Secretive {
  struct First {
    int operator()(int) const { return 0; }
  };

 public:
  static std::vector<float> train() { return halved_by<GivenBy<First>>(); }
};

}  // namespace

TEST_CASE("Policies may be made of private members, of what one function knows, and of lambdas",
          "[zero][cuda][B098]") {
  require_devices(1);
  struct Local {
    int operator()(int world) const { return world - 1; }
  };
  const auto lambda = [](int world) { return world / 2; };
  const std::vector<float> expected(300, 0.5f);
  CHECK(Secretive::train() == expected);
  CHECK(halved_by<GivenBy<Local>>() == expected);
  CHECK(halved_by<GivenBy<decltype(lambda)>>() == expected);
}

TEST_CASE("Collectives of no element return and touch nothing", "[collectives][cuda][B064]") {
  require_devices(2);
  const Communicators comms(2);
  std::vector<float> got[2];
  on_ranks(2, [&](int rank) {
    const OwnStream stream;
    const OwnMemory<float> buffer(8);
    buffer.write(std::vector<float>(8, 3.0f), stream);
    so::Nccl plain = so::Nccl::borrow(comms[rank], stream);
    so::Nccl checked = so::Nccl::borrow(comms[rank], stream).verifying_calls();
    const std::vector<std::int64_t> borders(3, 0);
    for (so::Nccl* comm : {&plain, &checked}) {
      for (const auto reduction : {so::Reduction::native, so::Reduction::ordered}) {
        comm->reduce_scatter(buffer.data(), {borders}, so::Dtype::fp32, reduction, buffer.data());
      }
      comm->all_gather(buffer.data(), {borders}, so::Dtype::fp32);
      comm->all_reduce(reinterpret_cast<std::int64_t*>(buffer.data()), 0);
      comm->broadcast(buffer.data(), 0, 1);
      comm->exchange({}, {}, buffer.data());
    }
    got[rank] = buffer.read(stream);
  });
  CHECK(got[0] == std::vector<float>(8, 3.0f));
  CHECK(got[1] == got[0]);
}

TEST_CASE("A collective that checks its calls tells all ranks what others called",
          "[collectives][cuda][B065]") {
  require_devices(2);
  const Communicators comms(2);
  std::vector<std::string> texts[2];
  std::vector<float> got[2];
  on_ranks(2, [&](int rank) {
    const OwnStream stream;
    const OwnMemory<float> buffer(24);
    buffer.write(std::vector<float>(24, 1.0f), stream);
    so::Nccl comm = so::Nccl::borrow(comms[rank], stream).verifying_calls();
    const std::vector<std::int64_t> ten{0, 5, 10};
    const std::vector<std::int64_t> twelve{0, 6, 12};
    const std::vector<std::int64_t> uneven{0, 7, 10};
    const auto differ = [&](const auto& call) {
      texts[rank].push_back(message_of<so::CollectiveError>(call));
    };
    differ([&] {
      comm.reduce_scatter(buffer.data(), {rank == 0 ? ten : twelve}, so::Dtype::fp32, so::Reduction::native,
                          nullptr);
    });
    differ([&] {
      if (rank == 0) comm.all_gather(buffer.data(), {ten}, so::Dtype::fp32);
      if (rank == 1)
        comm.reduce_scatter(buffer.data(), {ten}, so::Dtype::fp32, so::Reduction::native, nullptr);
    });
    differ([&] { comm.broadcast(buffer.data(), 40, rank); });
    differ([&] { comm.all_gather(buffer.data(), {ten}, rank == 0 ? so::Dtype::fp32 : so::Dtype::bf16); });
    differ([&] { comm.all_gather(buffer.data(), {rank == 0 ? ten : uneven}, so::Dtype::fp32); });
    got[rank] = buffer.read(stream);
    comm.all_reduce(reinterpret_cast<std::int64_t*>(buffer.data()), 2);  // agreed: goes on
    stream.synchronize();
  });
  CHECK(texts[0] == texts[1]);
  const auto names = [&](std::size_t k, const char* a, const char* b) {
    CAPTURE(texts[0][k]);
    CHECK(texts[0][k].find(a) != std::string::npos);
    CHECK(texts[0][k].find(b) != std::string::npos);
  };
  names(0, "of 10 fp32", "of 12 fp32");
  names(1, "all_gather", "reduce_scatter");
  names(2, "root 0", "root 1");
  names(3, "of 10 fp32", "of 10 bf16");
  names(4, "rank 0 all_gather", "rank 1 all_gather");
  CHECK(got[0] == std::vector<float>(24, 1.0f));
  CHECK(got[1] == got[0]);
}
