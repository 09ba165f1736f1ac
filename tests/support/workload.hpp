// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/parameter_table.hpp>
#include <support/numbers.hpp>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace test {

/// One parameter of a workload.
struct Tensor {
  std::string name;
  std::int64_t numel = 0;
  std::string group = "decay";
  std::int64_t gap = 0;  ///< elements of nothing before it in memory
  bool frozen = false;
  std::string alias_of = {};
};

enum class Kind { normal, zero_gradient, infinite, not_a_number, discarded };

/// What the engine does in one step.
struct StepPlan {
  float lr_factor = 1;
  float gradient_scale = 1;
  Kind kind = Kind::normal;
};

/// Where gradients come from.
enum class Gradients {
  exact,   ///< the ranks' sums are exact, and the same for every world size up to eight
  ranked,  ///< each rank has its own; the sum depends on the order of addition
};

/// Everything about a training run but the optimizer.
struct Workload {
  std::string name;
  std::vector<Tensor> tensors;
  Gradients gradients = Gradients::exact;
  bool reversed = false;        ///< the last tensor lies first in memory
  bool separate = false;        ///< the table holds addresses, not offsets
  std::int64_t misaligned = 0;  ///< elements between an aligned address and the buffers' start
  std::vector<StepPlan> steps = {};
};

/// A tensor with its place in memory and in the flat index.
struct Placed {
  Tensor tensor;
  std::int64_t offset = 0;
  std::int64_t flat = 0;  ///< of the first element; meaningless where it is frozen or an alias
  [[nodiscard]] bool trainable() const { return !tensor.frozen && tensor.alias_of.empty(); }
};

/// The places of a workload's tensors, computed here and not by the library.
struct Places {
  std::vector<Placed> tensors;
  std::int64_t extent = 0;                   ///< elements of each flat buffer
  std::int64_t elements = 0;                 ///< trainable ones
  std::vector<std::int64_t> memory_of_flat;  ///< offset of each trainable element

  explicit Places(const Workload& work) {
    for (const Tensor& tensor : work.tensors) tensors.push_back({tensor});
    std::vector<std::size_t> order;
    for (std::size_t k = 0; k < tensors.size(); ++k)
      order.push_back(work.reversed ? tensors.size() - 1 - k : k);
    for (const std::size_t k : order) {
      if (!tensors[k].tensor.alias_of.empty()) continue;
      extent += tensors[k].tensor.gap;
      tensors[k].offset = extent;
      extent += tensors[k].tensor.numel;
    }
    extent += 5;  // a gap at the end
    for (Placed& placed : tensors) {
      if (!placed.trainable()) continue;
      placed.flat = elements;
      elements += placed.tensor.numel;
      for (std::int64_t i = 0; i < placed.tensor.numel; ++i) memory_of_flat.push_back(placed.offset + i);
    }
  }
};

/// The table of a workload. @param parameters, gradients  only where it is to hold addresses
template <class Param, class Grad>
[[nodiscard]] so::ParameterTable table_of(const Workload& work, const Places& places, Param* parameters,
                                          Grad* gradients) {
  so::ParameterTable table;
  for (const Placed& placed : places.tensors) {
    const Tensor& tensor = placed.tensor;
    so::ParameterInfo info{.name = tensor.name,
                           .shape = {tensor.numel},
                           .group = tensor.group,
                           .frozen = tensor.frozen,
                           .alias_of = tensor.alias_of};
    if (tensor.alias_of.empty()) {
      if (work.separate) {
        info.parameter = parameters + placed.offset;
        info.gradient = tensor.frozen ? nullptr : gradients + placed.offset;
      } else {
        info.offset = placed.offset;
      }
    }
    table.add(info);
  }
  return table;
}

/// The parameter that stands at an offset at the start.
template <class Param>
[[nodiscard]] Param initial_parameter(std::int64_t offset) {
  const auto word = static_cast<std::int64_t>(noise(1, offset) % 4001) - 2000;
  return rounded<Param>(static_cast<double>(word) / 1024);
}

/// One rank's gradient of a flat element in a step.
template <class Grad>
[[nodiscard]] Grad gradient_of(const Workload& work, std::size_t step, int rank, int world, std::int64_t flat,
                               std::int64_t elements) {
  const Kind kind = work.steps[step].kind;
  if (kind == Kind::zero_gradient) return rounded<Grad>(0.0);
  const bool poisoned =
      flat == static_cast<std::int64_t>(noise(7, step) % static_cast<std::uint64_t>(elements)) &&
      rank == static_cast<int>(step) % world;
  if (poisoned && kind == Kind::infinite) return rounded<Grad>(std::numeric_limits<double>::infinity());
  if (poisoned && kind == Kind::not_a_number) return rounded<Grad>(std::numeric_limits<double>::quiet_NaN());
  if (work.gradients == Gradients::ranked) {
    const std::uint64_t word = noise(2, step, rank, flat);
    const double mantissa = static_cast<double>(word % 2000001) / 1000000 - 1;
    return rounded<Grad>(std::ldexp(mantissa, static_cast<int>(word >> 60) - 12));
  }
  // Eight small integers dealt to the ranks: every sum of them is exact in every type.
  std::int64_t sum = 0;
  for (int part = rank; part < 8; part += world)
    sum += static_cast<std::int64_t>(noise(3, step, part, flat) % 17) - 8;
  return rounded<Grad>(static_cast<double>(sum) / 16);
}

/// Thirteen steps: another learning rate in each, an infinity, a NaN, a step without gradient, one that the
/// engine discards.
[[nodiscard]] inline std::vector<StepPlan> thirteen_steps() {
  std::vector<StepPlan> steps;
  for (int k = 0; k < 13; ++k) {
    steps.push_back(
        {.lr_factor = 1.0f - static_cast<float>(k) / 16, .gradient_scale = k % 3 == 0 ? 1.0f : 1.0f / 64});
  }
  steps[4].kind = Kind::infinite;
  steps[7].kind = Kind::zero_gradient;
  steps[9].kind = Kind::not_a_number;
  steps[10].kind = Kind::discarded;
  return steps;
}

/// Tensors of every size that has gone wrong somewhere: empty ones first, in the middle and last, tile and
/// grain borders, primes; gaps, frozen tensors and an alias among them; two groups that alternate.
[[nodiscard]] inline Workload awkward_workload() {
  return {.name = "awkward",
          .tensors = {{"empty_first", 0, "plain"},
                      {"one", 1, "decay", 1},
                      {"w255", 255, "plain"},
                      {"w256", 256, "decay", 3},
                      {"frozen_middle", 70, "plain", 0, true},
                      {"w257", 257, "plain"},
                      {"empty_middle", 0, "decay", 2},
                      {"w2047", 2047, "decay"},
                      {"w2048", 2048, "plain", 64},
                      {"tied", 255, "plain", 0, false, "w255"},
                      {"w2049", 2049, "decay"},
                      {"prime", 997, "decay", 7},
                      {"w3", 3, "plain"},
                      {"frozen_last", 5, "decay", 0, true},
                      {"empty_last", 0, "plain"}},
          .misaligned = 1,
          .steps = thirteen_steps()};
}

/// One tensor of a size, cut by nothing else.
[[nodiscard]] inline Workload single_tensor(std::int64_t numel) {
  return {.name = "single " + std::to_string(numel),
          .tensors = {{"w", numel, "decay"}},
          .steps = thirteen_steps()};
}

}  // namespace test
