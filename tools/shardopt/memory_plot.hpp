// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/zero/memory_plan.hpp>

#include <string>
#include <vector>

namespace tool {

/// One picture of several: bars of one rule and precision, one for each world size.
struct PlotPanel {
  std::string title;
  std::vector<shardopt::MemoryPlan> plans;  ///< by world size
};

/// A plot as SVG: for each world size a bar of what one rank needs (parameters, gradients, states, masters),
/// all panels to one scale.
[[nodiscard]] std::string memory_plot(const std::string& title, const std::vector<PlotPanel>& panels);

}  // namespace tool
