// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace mlp {

/// Starts this program `processes` times on this machine, with the same arguments and its place in each one's
/// environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), and waits. When one fails the others
/// are killed. None of them outlives the caller.
/// @pre this process has not used CUDA
/// @return 0, or the exit code of the first that failed: 128 + N if signal N has killed it
/// @throws std::runtime_error if a process cannot be started
int launch(int processes, char* const* arguments);

/// How many GPUs a process would see, without that this one uses CUDA.
int gpus_of_children();

}  // namespace mlp
