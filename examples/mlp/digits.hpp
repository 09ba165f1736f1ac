// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace mlp {

/// Images and their classes, in file order.
struct Samples {
  static constexpr int pixels_per_image = 64;

  std::vector<float> pixels;         ///< count() × 64, row by row, 0 to 1 (sixteenths: exact in bf16)
  std::vector<std::int32_t> labels;  ///< 0 to 9

  [[nodiscard]] int count() const { return static_cast<int>(labels.size()); }
};

/// The handwritten digits, split: every fifth row, from the first on, is a test sample.
struct Digits {
  Samples train;
  Samples test;
};

/// Reads and checks the file.
/// @throws UsageError if it is missing or is not, value for value, the published data
Digits load_digits(const std::string& path);

}  // namespace mlp
