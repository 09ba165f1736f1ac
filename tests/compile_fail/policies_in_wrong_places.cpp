// SPDX-License-Identifier: Apache-2.0
// expect: ShardingPolicy
#include <shardopt/shardopt.hpp>

namespace so = shardopt;

using Wrong = so::ZeroOptimizer<so::AdamW, so::AdamW, so::Solo<so::Host>, so::FullPrecision>;
Wrong* wrong = nullptr;
