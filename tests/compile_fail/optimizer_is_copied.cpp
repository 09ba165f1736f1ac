// SPDX-License-Identifier: Apache-2.0
// expect: deleted
#include <shardopt/shardopt.hpp>

namespace so = shardopt;

using Optimizer = so::ZeroOptimizer<so::AdamW, so::FlatSharding, so::Solo<so::Host>, so::FullPrecision>;
Optimizer wrong(const Optimizer& optimizer) { return optimizer; }
