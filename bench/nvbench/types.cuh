// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/cuda.cuh>

#include <nvbench/nvbench.cuh>

namespace bench {

using Fp32 = shardopt::FullPrecision;
using Bf16 = shardopt::Mixed<shardopt::bf16, shardopt::bf16, float>;
using Bf16Fp32 = shardopt::Mixed<shardopt::bf16, float, float>;
using Fp16 = shardopt::Mixed<shardopt::fp16, shardopt::fp16, float>;
using Fp16Fp32 = shardopt::Mixed<shardopt::fp16, float, float>;

}  // namespace bench

NVBENCH_DECLARE_TYPE_STRINGS(bench::Fp32, "fp32", "fp32");
NVBENCH_DECLARE_TYPE_STRINGS(bench::Bf16, "bf16", "bf16 parameters and gradients, fp32 masters");
NVBENCH_DECLARE_TYPE_STRINGS(bench::Bf16Fp32, "bf16/fp32", "bf16 parameters, fp32 gradients and masters");
NVBENCH_DECLARE_TYPE_STRINGS(bench::Fp16, "fp16", "fp16 parameters and gradients, fp32 masters");
NVBENCH_DECLARE_TYPE_STRINGS(bench::Fp16Fp32, "fp16/fp32", "fp16 parameters, fp32 gradients and masters");
NVBENCH_DECLARE_TYPE_STRINGS(shardopt::Adam, "Adam", "Adam");
NVBENCH_DECLARE_TYPE_STRINGS(shardopt::AdamAmsgrad, "AdamAmsgrad", "Adam with AMSGrad");
NVBENCH_DECLARE_TYPE_STRINGS(shardopt::AdamW, "AdamW", "AdamW");
NVBENCH_DECLARE_TYPE_STRINGS(shardopt::AdamWAmsgrad, "AdamWAmsgrad", "AdamW with AMSGrad");
NVBENCH_DECLARE_TYPE_STRINGS(shardopt::SGD, "SGD", "SGD with momentum");
NVBENCH_DECLARE_TYPE_STRINGS(shardopt::bf16, "bf16", "bf16");
NVBENCH_DECLARE_TYPE_STRINGS(shardopt::fp16, "fp16", "fp16");
