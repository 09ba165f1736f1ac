// SPDX-License-Identifier: Apache-2.0
#include <shardopt/core/dtype.hpp>
#include <shardopt/core/version.hpp>

int main() {
  return shardopt::size_of(shardopt::Dtype::bf16) == 2 && shardopt::version.minor_number >= 1 ? 0 : 1;
}
