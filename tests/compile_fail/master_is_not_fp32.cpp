// SPDX-License-Identifier: Apache-2.0
// expect: the update works on fp32 masters: Mixed<Param, Grad, float>
#include <shardopt/precision/mixed.hpp>

bool wrong() { return shardopt::Mixed<float, float, double>::has_master; }
