// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "signum.hpp"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

/// What both programs train: 10,000 parameters, each with a target and the gradient 2 (w - target).
inline constexpr std::int64_t elements = 10'000;
inline constexpr int steps = 20;

inline shardopt::ParameterTable parameter_table() {
  shardopt::ParameterTable table;
  table.add({.name = "w", .shape = {100, 100}, .offset = 0});
  return table;
}

/// The parameters after all steps, by a plain loop without the library. With gradients and steps that are
/// exact in fp32 any order of operations gives these bits.
inline std::vector<float> expected() {
  std::vector<float> w(elements, 0.0F);
  std::vector<float> momentum(elements, 0.0F);
  for (int step = 0; step < steps; ++step) {
    for (std::size_t n = 0; n < w.size(); ++n) {
      const float target = static_cast<float>(n % 7) - 3.0F;
      momentum[n] = std::fma(0.5F, momentum[n] - 2 * (w[n] - target), 2 * (w[n] - target));
      w[n] -= momentum[n] < 0 ? -0.125F : 0.125F;
    }
  }
  return w;
}

/// Prints how it went. @return the program's exit code
inline int judge(const std::vector<float>& parameters, int ranks) {
  const bool right = parameters == expected();
  std::printf("%s: %d ranks, %lld parameters, %d steps of a custom rule\n", right ? "right" : "WRONG", ranks,
              static_cast<long long>(elements), steps);
  return right ? 0 : 1;
}
