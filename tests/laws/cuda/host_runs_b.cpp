// SPDX-License-Identifier: Apache-2.0
#include <laws/cuda/cases.hpp>
#define SHARDOPT_TEST_CASES_HERE(X) \
  SHARDOPT_TEST_CASES_BF16_FP32(X) SHARDOPT_TEST_CASES_FP16(X) SHARDOPT_TEST_CASES_FP16_FP32(X)
#include <laws/cuda/host_runs.inc>
