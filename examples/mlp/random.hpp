// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace mlp {

/// SplitMix64 (Steele, Lea and Flood 2014): the same numbers with every compiler and standard library, which
/// the distributions of <random> do not promise.
class Random {
 public:
  /// Sequences of different seed or stream are unrelated.
  Random(std::uint64_t seed, std::uint64_t stream) : state_(seed) {
    state_ = next() ^ (stream * 0xD1342543DE82EF95U);
  }

  std::uint64_t next() {
    state_ += 0x9E3779B97F4A7C15U;
    std::uint64_t mixed = state_;
    mixed = (mixed ^ (mixed >> 30U)) * 0xBF58476D1CE4E5B9U;
    mixed = (mixed ^ (mixed >> 27U)) * 0x94D049BB133111EBU;
    return mixed ^ (mixed >> 31U);
  }

  /// Uniform in [-1, 1), in steps of 2^-23: exact in fp32.
  float symmetric() { return static_cast<float>(next() >> 40U) * 0x1p-23F - 1.0F; }

  /// Uniform in 0 … bound - 1 (the bias, below bound / 2^32, does not matter here).
  std::uint32_t below(std::uint32_t bound) {
    return static_cast<std::uint32_t>(((next() >> 32U) * std::uint64_t{bound}) >> 32U);
  }

 private:
  std::uint64_t state_;
};

/// The order of an epoch's samples: a permutation of 0 … count - 1, the same on all ranks.
inline std::vector<std::int32_t> sample_order(int count, std::uint64_t seed, int epoch) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(count));
  for (std::size_t at = 0; at < order.size(); ++at) order[at] = static_cast<std::int32_t>(at);
  Random random(seed, 1 + static_cast<std::uint64_t>(epoch));
  for (std::size_t left = order.size(); left > 1; --left) {
    std::swap(order[left - 1], order[random.below(static_cast<std::uint32_t>(left))]);
  }
  return order;
}

}  // namespace mlp
