// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Sharded checkpoints. Needs nlohmann-json and xxHash (target shardopt::checkpoint), and no CUDA.

#include <shardopt/checkpoint/async_saver.hpp>
#include <shardopt/checkpoint/checkpoint.hpp>
#include <shardopt/checkpoint/diff.hpp>
#include <shardopt/checkpoint/generations.hpp>
#include <shardopt/checkpoint/load.hpp>
#include <shardopt/checkpoint/merge.hpp>
#include <shardopt/checkpoint/reshard.hpp>
#include <shardopt/checkpoint/save.hpp>
#include <shardopt/checkpoint/verify.hpp>
