// SPDX-License-Identifier: Apache-2.0
#include "use_cuda.cuh"

double unit_d();
double unit_d() { return use_cuda(); }
