// SPDX-License-Identifier: Apache-2.0
#include <laws/cuda/cases.hpp>
#define SHARDOPT_TEST_CASES_HERE(X) X(AdamW, so::AdamW, so::FlatSharding, Fp32) X(Adam, so::Adam, ScatterSharding, Fp16)
#include <laws/cuda/nccl_runs.inc>
