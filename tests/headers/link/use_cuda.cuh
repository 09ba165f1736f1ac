// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "use_host.hpp"

#include <all_cuh.inc>

inline double use_cuda() { return use_host(); }
