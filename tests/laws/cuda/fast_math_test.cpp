// SPDX-License-Identifier: Apache-2.0
// In this program nvcc compiles with --use_fast_math and -Ofast; the host's side is compiled with neither.
#include <laws/cuda/cases.hpp>
#include <support/require_devices.hpp>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

using namespace test;

TEMPLATE_TEST_CASE("GPUs whose code was compiled with fast math give the bits of a host without", "[laws][cuda][law3]",
                   (Case<so::AdamW, so::FlatSharding, Fp32>), (Case<so::Adam, ScatterSharding, Fp16>)) {
  // Also with subnormal numbers, which fast math flushes.
  const float magnitude = GENERATE(1.0f, 3e-39f);
  require_devices(3);
  Workload w = awkward(3);
  w.magnitude = magnitude;
  if (magnitude < 1.0f) w.max_norm = 1e-38f;
  const Outcome host = run_on_host<TestType>(w);
  const Outcome cuda = run_on_nccl<TestType>(w);
  CHECK(difference(host, cuda, TestType::types) == "");
  CHECK(foreign_writes(w, cuda, TestType::types) == "");
}
