// SPDX-License-Identifier: Apache-2.0
// One step each, run with counters (tests/traffic/CMakeLists.txt).
#include <laws/cuda/case_list.hpp>
#include <support/require_devices.hpp>

#include <catch2/catch_test_macros.hpp>

namespace {

using namespace test;

/// One step over `elements` in two buckets or more.
template <class Rule, class Sharding, class Precision>
void one_step(int world, std::int64_t elements, int variant = 0,
              so::Reduction reduction = so::Reduction::native) {
  require_devices(world);
  Workload w = sized(world, {elements / 2, elements - elements / 2});
  w.variant = variant;
  w.reduction = reduction;
  w.bucket_bytes = elements;
  const Outcome outcome = case_of<Rule, Sharding, Precision>().on_nccl(w);
  for (const RankOutcome& rank : outcome) CHECK(rank.results.front().updates == 1);
}

}  // namespace

TEST_CASE("traffic: AdamW, fp32", "[.][traffic]") { one_step<so::AdamW, so::FlatSharding, Fp32>(1, 65536); }
TEST_CASE("traffic: AdamW, bf16 parameters, fp32 gradients", "[.][traffic]") {
  one_step<so::AdamW, ScatterSharding, Bf16Fp32>(1, 65536);
}
TEST_CASE("traffic: Adam, all bf16", "[.][traffic]") { one_step<so::Adam, so::FlatSharding, Bf16>(1, 65536); }
TEST_CASE("traffic: SGD", "[.][traffic]") { one_step<so::SGD, so::Replicated, Fp32>(1, 65536, 1); }
TEST_CASE("traffic: SGD with momentum", "[.][traffic]") {
  one_step<so::SGD, so::Replicated, Fp32>(1, 65536, 0);
}
TEST_CASE("traffic: four ranks, native", "[.][traffic]") {
  one_step<so::AdamW, so::FlatSharding, Fp32>(4, 65536);
}
TEST_CASE("traffic: four ranks, ordered", "[.][traffic]") {
  one_step<so::AdamW, so::FlatSharding, Fp32>(4, 65536, 0, so::Reduction::ordered);
}
TEST_CASE("traffic: three ranks with unequal slices", "[.][traffic]") {
  one_step<so::Adam, so::PerParameterSharding, Fp32>(3, 65536);
}
TEST_CASE("traffic: two ranks that keep everything", "[.][traffic]") {
  one_step<so::SGD, so::Replicated, Fp32>(2, 65536);
}
