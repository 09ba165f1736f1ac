// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Everything that needs no CUDA. With it: shardopt/cuda.cuh.

#include <shardopt/collectives/solo.hpp>
#include <shardopt/collectives/threads.hpp>
#include <shardopt/core/version.hpp>
#include <shardopt/devices/host.hpp>
#include <shardopt/precision/mixed.hpp>
#include <shardopt/rules/adam.hpp>
#include <shardopt/rules/adamw.hpp>
#include <shardopt/rules/sgd.hpp>
#include <shardopt/sharding/flat_sharding.hpp>
#include <shardopt/sharding/per_parameter_sharding.hpp>
#include <shardopt/sharding/replicated.hpp>
#include <shardopt/zero/zero_optimizer.hpp>
