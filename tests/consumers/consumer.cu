// SPDX-License-Identifier: Apache-2.0
#include <shardopt/core/dtype.hpp>

#include <nccl.h>

int main() {
  int version = 0;
  return shardopt::size_of(shardopt::Dtype::bf16) == 2 && ncclGetVersion(&version) == ncclSuccess ? 0 : 1;
}
