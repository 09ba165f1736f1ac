// SPDX-License-Identifier: Apache-2.0
#include <laws/cuda/case_list.hpp>
#include <support/require_devices.hpp>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_floating_point.hpp>

#include <cmath>

namespace {

using namespace test;
using Catch::Matchers::WithinRel;

constexpr float infinity = std::numeric_limits<float>::infinity();

/// Both devices must give `expected`; `read` picks a number of an outcome.
template <class Read>
void check_both(const NamedCase& c, const Workload& w, double expected, double relative, const Read& read) {
  const double host = read(c.on_host(w));
  const double cuda = read(c.on_nccl(w));
  CHECK(host == cuda);
  CHECK_THAT(cuda, WithinRel(expected, relative));
}

double parameter(const Outcome& outcome, so::Dtype type, std::int64_t index) {
  return static_cast<double>(element(outcome.front().parameters.back(), type, index));
}

double state(const Outcome& outcome, const char* name) {
  return static_cast<double>(outcome.front().states.at(name).front());
}

Workload one_element(float parameter, float gradient) {
  Workload w = sized(1, {1});
  w.given_parameter = [=](std::int64_t) { return parameter; };
  w.given_gradient = [=](int, int, std::int64_t) { return gradient; };
  return w;
}

const NamedCase adam = case_of<so::Adam, so::PerParameterSharding, Fp32>();
const NamedCase adamw = case_of<so::AdamW, so::FlatSharding, Fp32>();

}  // namespace

TEST_CASE("Odd sizes and unaligned buffers are updated like any others on GPUs", "[laws][cuda][B008]") {
  const int world = GENERATE(1, 2, 3);
  require_devices(world);
  const std::size_t precision = GENERATE(as<std::size_t>{}, 0, 1, 2);
  const NamedCase c = precision == 0   ? adam
                      : precision == 1 ? case_of<so::Adam, so::FlatSharding, Bf16>()
                                       : case_of<so::Adam, ScatterSharding, Fp16>();
  Workload w = sized(world, {3, 5, 7, 1, 64, 9});
  w.shift_parameters = w.shift_gradients = 1;
  w.hyper = {.lr = 0.1, .weight_decay = 0.0};
  w.given_parameter = [](std::int64_t) { return 0.0f; };
  w.given_gradient = [](int, int, std::int64_t) { return 1.0f; };
  const Outcome outcome = c.on_nccl(w);
  for (const RankOutcome& rank : outcome) {
    for (std::int64_t k = 0; k < w.extent; ++k) {
      const float got = element(rank.parameters.back(), c.types.parameter, k);
      const float expected[] = {-0.1f, -0.10009765625f, -0.0999755859375f};  // the nearest of each type
      CHECK_THAT(static_cast<double>(got),
                 WithinRel(static_cast<double>(expected[precision]), precision == 0 ? 1e-6 : 0.0));
    }
  }
  CHECK(foreign_writes(w, outcome, c.types) == "");
}

TEST_CASE("Second-moment decays keep their digits with 16-bit parameters on GPUs", "[laws][cuda][B033]") {
  require_devices(1);
  const NamedCase c = case_of<so::Adam, so::FlatSharding, Bf16>();
  for (const auto& [beta2, expected] : {std::pair{0.999, 1e-3}, std::pair{0.9999, 1e-4}}) {
    CAPTURE(beta2);
    Workload w = one_element(0.0f, 1.0f);
    w.hyper = {.lr = 0.25, .beta1 = 0.9, .beta2 = beta2, .eps = 1e-8, .weight_decay = 0.0};
    check_both(c, w, expected, 1e-6, [](const Outcome& o) { return state(o, "exp_avg_sq"); });
    check_both(c, w, -0.25, 1e-6, [](const Outcome& o) { return parameter(o, so::Dtype::bf16, 0); });
  }
}

TEST_CASE("Epsilon stands outside the root after the correction, on GPUs too", "[laws][cuda][B034]") {
  require_devices(1);
  Workload w = one_element(0.0f, 1e-8f);
  w.hyper = {.lr = 1.0, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.0};
  check_both(adam, w, -0.5, 1e-6, [](const Outcome& o) { return parameter(o, so::Dtype::fp32, 0); });
}

TEST_CASE("AdamW decays the parameter and Adam the gradient, on GPUs too", "[laws][cuda][B034]") {
  require_devices(1);
  const auto p = [](const Outcome& o) { return parameter(o, so::Dtype::fp32, 0); };
  Workload w = one_element(1.0f, 0.0f);
  w.hyper = {.lr = 0.1, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1};
  check_both(adamw, w, 0.99, 1e-6, p);
  CHECK(state(adamw.on_nccl(w), "exp_avg") == 0.0);
  CHECK(state(adamw.on_nccl(w), "exp_avg_sq") == 0.0);
  check_both(adam, w, 0.9, 1e-6, p);
  check_both(adam, w, 0.01, 1e-6, [](const Outcome& o) { return state(o, "exp_avg"); });
  check_both(adam, w, 1e-5, 1e-6, [](const Outcome& o) { return state(o, "exp_avg_sq"); });
  w.given_gradient = [](int, int, std::int64_t) { return 1.0f; };
  check_both(adamw, w, 0.89, 1e-6, p);
  check_both(adam, w, 0.9, 1e-6, p);
}

TEST_CASE("Norms of 16-bit gradients are taken in more digits on GPUs", "[laws][cuda][B040]") {
  require_devices(4);
  const auto norm = [](const Outcome& o) { return o.front().results.front().norm; };
  Workload fp16 = sized(2, {4});
  fp16.given_gradient = [](int, int rank, std::int64_t) { return rank == 0 ? 5000.0f : 0.0f; };
  check_both(case_of<so::Adam, ScatterSharding, Fp16>(), fp16, 10000.0, 1e-15, norm);
  Workload bf16 = sized(4, {4 * 257});
  bf16.given_gradient = [](int, int rank, std::int64_t at) { return at / 257 == rank ? 1.0f : 0.0f; };
  check_both(case_of<so::Adam, so::FlatSharding, Bf16>(), bf16, std::sqrt(1028.0), 1e-15, norm);
  Workload fp32 = sized(4, {(1 << 16) + 1});
  fp32.bucket_bytes = 1 << 17;
  fp32.given_gradient = [](int, int rank, std::int64_t) { return rank == 3 ? 1.0f : 0.0f; };
  check_both(adamw, fp32, std::sqrt(65537.0), 1e-15, norm);
}

TEST_CASE("The norm of 2^25 equal gradients does not stall on a GPU", "[laws][cuda][B040][full]") {
  require_devices(1);
  Workload w = sized(1, {1 << 25});
  w.bucket_bytes = 32 << 20;
  w.given_gradient = [](int, int, std::int64_t) { return 1.0f; };
  w.given_parameter = [](std::int64_t) { return 0.0f; };
  CHECK(case_of<so::SGD, so::Replicated, Fp32>().on_nccl(w).front().results.front().norm ==
        std::sqrt(33554432.0));
}

TEST_CASE("A non-finite gradient of any rank makes all GPUs skip the same step", "[laws][cuda][law7][B045]") {
  require_devices(4);
  const float special = GENERATE(infinity, -infinity, std::numeric_limits<float>::quiet_NaN());
  const bool adds_up = GENERATE(false, true);  // not in the raw gradient of one rank, but in the shard of one
  const NamedCase c = special > 0   ? adamw
                      : special < 0 ? case_of<so::SGD, so::PerParameterSharding, Bf16>()
                                    : adam;
  for (int k = 0; k < 4; ++k) {
    CAPTURE(special, adds_up, k, c.name);
    const std::int64_t shard = 256;
    Workload w = sized(4, {4 * shard});
    w.steps = 3;
    w.max_norm = 1.0f;
    const Workload noise_of = w;
    w.given_gradient = [=](int step, int rank, std::int64_t at) {
      const bool there = adds_up ? at == k * shard + 7 : rank == k && at == 3;
      return step == 1 && there ? special : gradient(noise_of, step, rank, at);
    };
    // The same steps, but for the second, in which the engine decides against a step without anything
    // infinite.
    Workload without = w;
    without.discarded_step = 1;
    without.given_gradient = {};
    const Outcome skipped = c.on_nccl(w);
    const Outcome discarded = c.on_nccl(without);
    for (std::size_t rank = 0; rank < 4; ++rank) {
      CHECK(skipped[rank].results[1].skipped);
      CHECK(skipped[rank].results[1].non_finite == 1);
      CHECK(std::isnan(skipped[rank].results[1].norm));
      CHECK(skipped[rank].results[1].updates == 1);
      CHECK(skipped[rank].parameters[1] == skipped[rank].parameters[0]);
      CHECK_FALSE(skipped[rank].results[2].skipped);
      CHECK(skipped[rank].results[2].updates == 2);
      CHECK(skipped[rank].parameters[2] == discarded[rank].parameters[2]);
      CHECK(skipped[rank].states == discarded[rank].states);
    }
  }
}

TEST_CASE("Ranks that own nothing step along on GPUs", "[laws][cuda][B064]") {
  require_devices(8);
  const Workload w = tiny(8);
  for (const std::size_t index : {std::size_t{0}, std::size_t{5}, std::size_t{14}, std::size_t{19}}) {
    const NamedCase& c = cases()[index];
    CAPTURE(c.name);
    const Outcome cuda = c.on_nccl(w);
    CHECK(difference(c.on_host(w), cuda, c.types) == "");
    CHECK(foreign_writes(w, cuda, c.types) == "");
  }
}

TEST_CASE("The same run on GPUs gives the same bits again, whatever the buckets", "[laws][cuda][B093]") {
  require_devices(4);
  Workload w = sized(4, {100003});
  w.steps = 2;
  w.max_norm = 0.5f;
  w.bucket_bytes = 1 << 18;
  const NamedCase c = case_of<so::SGD, so::FlatSharding, Bf16Fp32>();
  const Outcome first = c.on_nccl(w);
  CHECK(difference(first, c.on_nccl(w), c.types) == "");
  Workload other = w;
  other.bucket_bytes = 1 << 15;
  const Outcome again = c.on_nccl(other);
  for (std::size_t rank = 0; rank < 4; ++rank) {
    CHECK(again[rank].parameters == first[rank].parameters);
    CHECK(again[rank].results.back().norm == first[rank].results.back().norm);
  }
}

TEST_CASE("The norm of one reduced gradient is the same bits in every world of GPUs",
          "[laws][cuda][law2][B093]") {
  require_devices(8);
  std::vector<double> norms;
  for (const int world : {1, 2, 4, 8}) {
    Workload w = sized(world, {100003 / 4, 513});
    w.bucket_bytes = 1 << 14;
    const Workload noise_of = w;
    w.given_gradient = [=](int step, int rank, std::int64_t at) {
      return rank == world - 1 ? gradient(noise_of, step, 0, at) : 0.0f;
    };
    norms.push_back(adamw.on_nccl(w).front().results.front().norm);
  }
  CHECK(norms == std::vector<double>(4, norms.front()));
}

TEST_CASE("Twenty runs on GPUs give the same bits", "[laws][cuda][B093][full]") {
  require_devices(4);
  Workload w = sized(4, {100003});
  w.steps = 3;
  w.max_norm = 0.5f;
  w.bucket_bytes = 1 << 17;
  w.reduction = so::Reduction::native;
  const Outcome first = adamw.on_nccl(w);
  for (int run = 1; run < 20; ++run) CHECK(difference(first, adamw.on_nccl(w), adamw.types) == "");
}
