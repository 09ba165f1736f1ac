// SPDX-License-Identifier: Apache-2.0
#include <laws/cuda/cases.hpp>
#define SHARDOPT_TEST_CASES_HERE SHARDOPT_TEST_CASES_FP32
#include <laws/cuda/nccl_runs.inc>

namespace test {
template Outcome run_on_solo_cuda<Case<so::AdamW, so::FlatSharding, Fp32>>(const Workload&);
template Outcome run_on_threads_cuda<Case<so::AdamW, so::FlatSharding, Fp32>>(const Workload&,
                                                                              const std::vector<int>&);
template Outcome run_on_threads_cuda<Case<so::SGD, so::Replicated, Fp32>>(const Workload&,
                                                                          const std::vector<int>&);
}  // namespace test
