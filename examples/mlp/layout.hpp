// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "random.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace mlp {

/// A fully connected layer: its widths, and where its tensors lie in the flat buffers (in elements).
struct Layer {
  int inputs = 0;
  int outputs = 0;
  std::int64_t weight = 0;  ///< outputs × inputs, row by row
  std::int64_t bias = 0;    ///< outputs

  [[nodiscard]] std::int64_t weights() const { return std::int64_t{outputs} * inputs; }
};

/// How the engine packs its tensors into one flat buffer of parameters and one of gradients.
struct Layout {
  static constexpr std::int64_t alignment =
      32;  ///< of each tensor, in elements; leaves gaps that belong to nobody

  std::vector<Layer> layers;
  std::int64_t elements = 0;  ///< of each buffer, gaps included

  explicit Layout(const std::vector<int>& widths) {
    const auto place = [this](std::int64_t count) {
      const std::int64_t begin = (elements + alignment - 1) / alignment * alignment;
      elements = begin + count;
      return begin;
    };
    for (std::size_t at = 0; at + 1 < widths.size(); ++at) {
      Layer layer{.inputs = widths[at], .outputs = widths[at + 1]};
      layer.weight = place(layer.weights());
      layer.bias = place(layer.outputs);
      layers.push_back(layer);
    }
  }

  [[nodiscard]] std::size_t size() const { return static_cast<std::size_t>(elements); }
  [[nodiscard]] int depth() const { return static_cast<int>(layers.size()); }
  [[nodiscard]] const Layer& operator[](int layer) const { return layers[static_cast<std::size_t>(layer)]; }
};

/// The weights a run begins with (He et al. 2015, uniform; biases 0): a function of the seed, the same on
/// every rank and backend.
inline std::vector<float> initial_weights(const Layout& layout, std::uint64_t seed) {
  std::vector<float> flat(layout.size(), 0.0F);
  Random random(seed, 0);
  for (const Layer& layer : layout.layers) {
    const float bound = std::sqrt(6.0F / static_cast<float>(layer.inputs));
    for (std::int64_t at = 0; at < layer.weights(); ++at) {
      flat[static_cast<std::size_t>(layer.weight + at)] = bound * random.symmetric();
    }
  }
  return flat;
}

}  // namespace mlp
