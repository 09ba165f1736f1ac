// SPDX-License-Identifier: Apache-2.0
#include "run_cuda.cuh"

template mlp::Result mlp::run_cuda_in<mlp::Fp32>(const mlp::Run&);
template void mlp::check_cuda_in<mlp::Fp32>(const mlp::Run&);
