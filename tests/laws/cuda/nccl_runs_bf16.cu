// SPDX-License-Identifier: Apache-2.0
#include <laws/cuda/cases.hpp>
#define SHARDOPT_TEST_CASES_HERE SHARDOPT_TEST_CASES_BF16
#include <laws/cuda/nccl_runs.inc>
