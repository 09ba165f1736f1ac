// SPDX-License-Identifier: Apache-2.0
#include <laws/cuda/cases.hpp>
#define SHARDOPT_TEST_CASES_HERE SHARDOPT_TEST_CASES_BF16_FP32
#include <laws/cuda/nccl_runs.inc>

namespace test {
template Outcome run_on_solo_cuda<Case<SignRule, so::PerParameterSharding, Bf16Fp32>>(const Workload&);
template Outcome run_on_threads_cuda<Case<SignRule, so::PerParameterSharding, Bf16Fp32>>(
    const Workload&, const std::vector<int>&);
}  // namespace test
