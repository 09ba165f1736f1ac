// SPDX-License-Identifier: Apache-2.0
#include "run_cuda.cuh"

namespace mlp {

int gpus() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();  // "no device" is an answer
  return 0;
}

bool built_with_cuda() { return true; }

void check_cuda(const Run& run) {
  with_precision(run.options.precision,
                 [&]<class Precision>(Type<Precision>) { check_cuda_in<Precision>(run); });
}

Result run_cuda(const Run& run) {
  check_cuda(run);
  return with_precision(run.options.precision,
                        [&]<class Precision>(Type<Precision>) { return run_cuda_in<Precision>(run); });
}

}  // namespace mlp
