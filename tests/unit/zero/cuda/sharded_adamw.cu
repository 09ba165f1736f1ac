// SPDX-License-Identifier: Apache-2.0
#include "sharded_adamw.cuh"

template class shardopt::ZeroOptimizer<shardopt::AdamW, shardopt::FlatSharding, shardopt::Nccl,
                                       shardopt::FullPrecision>;
