// SPDX-License-Identifier: Apache-2.0
#include <laws/cuda/cases.hpp>
#define SHARDOPT_TEST_CASES_HERE SHARDOPT_TEST_CASES_BF16
#include <laws/cuda/nccl_runs.inc>

namespace test {
template Outcome run_on_threads_cuda<Case<SignRule, so::Replicated, Bf16>>(const Workload&,
                                                                           const std::vector<int>&);
}
