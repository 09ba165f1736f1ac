// SPDX-License-Identifier: Apache-2.0
/// Stands in for run_cuda.cu in a program built without CUDA.
#include "run.hpp"

#include <stdexcept>

namespace mlp {

int gpus() { return 0; }

bool built_with_cuda() { return false; }

void check_cuda(const Run&) { throw std::logic_error("built without CUDA"); }

Result run_cuda(const Run&) { throw std::logic_error("built without CUDA"); }

}  // namespace mlp
