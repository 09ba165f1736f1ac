// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <all_hpp.inc>

// The same in every translation unit, so that what it instantiates meets in the linker.
inline double use_host() { return static_cast<double>(shardopt::size_of(shardopt::Dtype::fp32)); }
