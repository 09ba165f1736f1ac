// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "layout.hpp"

#include <shardopt/shardopt.hpp>

#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace mlp {

/// The engine's tensors as the optimizer knows them: weights in the group "decay", biases in "plain".
struct Parameters {
  shardopt::ParameterTable table;
  std::vector<std::array<shardopt::ParameterId, 2>> ids;  ///< weight and bias of each layer

  explicit Parameters(const Layout& layout) {
    for (const Layer& layer : layout.layers) {
      const std::string name = "layer" + std::to_string(ids.size());
      const auto weight = table.add({.name = name + ".weight",
                                     .shape = {layer.outputs, layer.inputs},
                                     .offset = layer.weight,
                                     .group = "decay"});
      const auto bias = table.add(
          {.name = name + ".bias", .shape = {layer.outputs}, .offset = layer.bias, .group = "plain"});
      ids.push_back({weight, bias});
    }
  }

  [[nodiscard]] std::span<const shardopt::ParameterId> of_layer(int layer) const {
    return ids[static_cast<std::size_t>(layer)];
  }
};

}  // namespace mlp
