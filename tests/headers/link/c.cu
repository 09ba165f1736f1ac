// SPDX-License-Identifier: Apache-2.0
#include "use_cuda.cuh"

double unit_c();
double unit_c() { return use_cuda(); }
