// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Everything: shardopt.hpp, and what needs nvcc: CUDA and, where its header is found, NCCL.

#include <shardopt/collectives/threads.cuh>
#include <shardopt/devices/cuda.cuh>
#include <shardopt/shardopt.hpp>

#if __has_include(<nccl.h>)
#include <shardopt/collectives/nccl.cuh>
#endif
