// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace mlp {

/// A run of samples in an epoch's order: what one micro-batch of one rank works on.
struct Block {
  int first = 0;
  int count = 0;
};

/// Block `index` of the `blocks` into which step `step` of an epoch cuts its `batch` samples; sizes differ by
/// at most 1. Ranks · micro-batches decide the cut, not each alone: two ranks with one micro-batch and one
/// rank with two work on the same blocks.
inline Block block_of(int step, int batch, int blocks, int index) {
  const auto cut = [&](int at) { return static_cast<int>(std::int64_t{batch} * at / blocks); };
  return {.first = step * batch + cut(index), .count = cut(index + 1) - cut(index)};
}

}  // namespace mlp
