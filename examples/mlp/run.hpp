// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "rank.hpp"

namespace mlp {

/// Trains with ranks that are threads of this process, on the host.
Result run_host(const Run& run);

/// GPUs that answer; 0 in a program built without CUDA.
int gpus();

/// Whether the program was built with CUDA.
bool built_with_cuda();

/// Trains with one GPU and one thread a rank.
Result run_cuda(const Run& run);

}  // namespace mlp
