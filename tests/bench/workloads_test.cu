// SPDX-License-Identifier: Apache-2.0
// The benchmarks' workloads, small. The hidden cases run with counters (CMakeLists.txt): bytes declared are
// bytes moved.
#include <bench/workloads.cuh>
#include <support/require_devices.hpp>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include <cstdint>

namespace {

namespace so = shardopt;

using Fp32 = so::FullPrecision;
using Bf16 = so::Mixed<so::bf16, so::bf16, float>;
using Fp16Fp32 = so::Mixed<so::fp16, float, float>;

/// Launches twice, and waits.
template <class Workload>
bench::Traffic run(Workload&& workload) {
  const bench::Stream stream;
  workload.launch(stream.get());
  workload.launch(stream.get());
  REQUIRE(cudaStreamSynchronize(stream.get()) == cudaSuccess);
  return workload.bytes();
}

template <class Rule, class Precision>
bench::Traffic run_step(std::int64_t elements) {
  const bench::Stream stream;
  const bench::Stream comm_stream;
  const bench::Traffic bytes =
      run(bench::Step<Rule, Precision>(elements, {}, stream.get(), comm_stream.get()));
  return bytes;
}

constexpr std::int64_t counted_elements = 65536;

}  // namespace

TEST_CASE("a copy moves each byte in and out", "[bench][cuda]") {
  CHECK(run(bench::Copy(4096)).total() == 8192);
}

TEST_CASE("updates run at small sizes and declare their bytes", "[bench][cuda]") {
  const auto elements = GENERATE(as<std::int64_t>{}, 1, 2047, 2048, 2049, 10007);
  CAPTURE(elements);
  CHECK(run(bench::Update<so::AdamW, Fp32>(elements, {})).total() == 28 * elements);
  CHECK(run(bench::Update<so::Adam, Bf16>(elements, {})).total() == 28 * elements);
  CHECK(run(bench::Update<so::AdamWAmsgrad, Fp16Fp32>(elements, {})).total() == 38 * elements);
  CHECK(run(bench::Update<so::SGD, Fp32>(elements, {})).total() == 12 * elements);
  CHECK(run(bench::Update<so::SGD, Fp32>(elements, {.momentum = 0.9})).total() == 20 * elements);
}

TEST_CASE("norms run at small sizes and declare their bytes", "[bench][cuda]") {
  const auto elements = GENERATE(as<std::int64_t>{}, 1, 1023, 2049, 10007);
  CAPTURE(elements);
  CHECK(run(bench::Norm<float>(elements)).total() == 4 * elements);
  CHECK(run(bench::Norm<so::bf16>(elements)).total() == 2 * elements);
}

TEST_CASE("a step of one rank runs at small sizes", "[bench][cuda]") {
  const auto elements = GENERATE(as<std::int64_t>{}, 1, 2049, 10007);
  CAPTURE(elements);
  CHECK(run_step<so::AdamW, Fp32>(elements).total() == 32 * elements);
  CHECK(run_step<so::AdamW, Bf16>(elements).total() == 30 * elements);
}

TEST_CASE("a step of eight ranks on one device runs at small sizes", "[bench][cuda]") {
  test::require_devices(1);
  const auto elements = GENERATE(as<std::int64_t>{}, 1, 9, 2049, 10007);
  CAPTURE(elements);
  CHECK(run(bench::RanksStep<so::AdamW, Fp32>(8, elements, {})).read == (9 * 4 + 16 + 7 * 4) * elements);
  CHECK(run(bench::RanksStep<so::AdamW, Bf16>(8, elements, {})).written == (2 + 14 + 7 * 2) * elements);
}

TEST_CASE("counted: update of AdamW, fp32", "[.][counted]") {
  run(bench::Update<so::AdamW, Fp32>(counted_elements, {}));
}
TEST_CASE("counted: update of Adam, bf16", "[.][counted]") {
  run(bench::Update<so::Adam, Bf16>(counted_elements, {}));
}
TEST_CASE("counted: update of SGD", "[.][counted]") {
  run(bench::Update<so::SGD, Fp32>(counted_elements, {}));
}
TEST_CASE("counted: norm, fp32", "[.][counted]") { run(bench::Norm<float>(counted_elements)); }
TEST_CASE("counted: norm, bf16", "[.][counted]") { run(bench::Norm<so::bf16>(counted_elements)); }
