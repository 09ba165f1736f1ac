// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The whole optimizer for the comparison of builds: reduction, norm, clipping, a skipped step, update,
/// gather.

#include <shardopt/shardopt.hpp>

#include <stdexcept>
#include <utility>

#include "cases.hpp"

namespace bits {

inline constexpr std::uint64_t optimizer_steps = 6;
inline constexpr std::size_t optimizer_elements = 2500;

/// What a rank ends with.
struct Trained {
  std::vector<float> parameters;  ///< each as a float
  std::vector<double> norms;      ///< of each step
};

/// A rank's gradient: of very different sizes, a parameter of nothing but subnormal numbers among them, one
/// NaN in step 3.
inline std::vector<float> rank_gradient(int rank, std::uint64_t step) {
  awkward::Random random(1000 * step + static_cast<std::uint64_t>(rank));
  std::vector<float> result(optimizer_elements);
  for (std::size_t k = 0; k < result.size(); ++k) {
    const bool subnormal = k >= 1300 && k < 1700;
    result[k] = subnormal ? std::bit_cast<float>(random.bits32() & 0x807fffffU) : random.usual();
  }
  if (step == 3 && rank == 0) result[11] = std::bit_cast<float>(0x7fc00000U);
  if (step == 5)
    result.assign(result.size(), std::bit_cast<float>(0x000fffffU));  // the norm of subnormal numbers alone
  return result;
}

/// One rank's training. `Memory` has Stream and Buffer<T>, which is made from a vector, has data() and
/// values().
template <class Memory, class Rule, class Sharding, class Precision, class Comm>
Trained train_rank(Comm comm, typename Memory::Stream stream, const std::array<Rule, 2>& rules,
                   const Sharding& sharding) {
  namespace so = shardopt;
  using Param = typename Precision::Param;
  using Grad = typename Precision::Grad;
  using Optimizer = so::ZeroOptimizer<Rule, Sharding, Comm, Precision>;
  so::ParameterTable table;
  table.add({.name = "a", .shape = {1000}, .offset = 0, .group = "one"});
  table.add({.name = "b", .shape = {3, 100}, .offset = 1000, .group = "two"});
  table.add({.name = "c", .shape = {400}, .offset = 1300, .group = "one"});
  table.add({.name = "d", .shape = {1}, .offset = 1703, .group = "two"});
  table.add({.name = "e", .shape = {789}, .offset = 1711, .group = "two"});

  const int rank = comm.rank();
  const int world = comm.world();
  awkward::Random random(99);
  std::vector<Param> initial(optimizer_elements);
  for (Param& element : initial) element = so::from_float<Param>(random.usual());
  typename Memory::template Buffer<Param> parameters(initial);
  typename Memory::template Buffer<Grad> gradients{std::vector<Grad>(optimizer_elements)};

  Trained result;
  {
    const typename Optimizer::Config config{.groups = {{"one", rules[0]}, {"two", rules[1]}},
                                            .sharding = sharding,
                                            .reduction = so::Reduction::ordered,
                                            .max_norm = 10.0f};
    Optimizer optimizer(table, config, std::move(comm), so::FlatBuffers{parameters.data(), gradients.data()},
                        stream);
    for (std::uint64_t step = 0; step < optimizer_steps; ++step) {
      std::vector<Grad> gradient(optimizer_elements);
      const std::vector<float> values = rank_gradient(rank, step);
      for (std::size_t k = 0; k < gradient.size(); ++k) gradient[k] = so::from_float<Grad>(values[k]);
      gradients.set(gradient);
      const float factor =
          std::bit_cast<float>(0x3f800000U - static_cast<std::uint32_t>(step % 4) * 0x123457U);
      auto ticket =
          optimizer.step({.lr_factor = factor, .gradient_scale = world == 1 ? 1.0f : 1.0f / 3.0f}, stream);
      optimizer.wait_parameters(stream);
      result.norms.push_back(ticket.get().norm);
      Memory::wait(stream);
    }
  }
  for (const Param element : parameters.values()) result.parameters.push_back(so::to_float(element));
  return result;
}

/// The cases: each calls `run`, a template over Rule, Sharding and Precision, with a name.
template <class Visitor>
void for_each_optimizer(Visitor&& visit) {
  namespace so = shardopt;
  visit.template operator()<so::AdamW, so::FlatSharding, so::Mixed<so::bf16, so::bf16, float>>(
      "adamw.bf16",
      std::array<so::AdamW, 2>{so::AdamW{.lr = 0.01, .weight_decay = 0.1},
                               so::AdamW{.lr = 0.02, .beta1 = 0.8}},
      so::FlatSharding{.bucket_bytes = 2048});
  visit.template operator()<so::SGD, so::PerParameterSharding, so::Mixed<float, float, float>>(
      "sgd.fp32",
      std::array<so::SGD, 2>{so::SGD{.lr = 0.1, .momentum = 0.9},
                             so::SGD{.lr = 0.2, .momentum = 0.5, .nesterov = true}},
      so::PerParameterSharding{.bucket_bytes = 4096});
}

/// Its lines: engine.ranks<Rule, Sharding, Precision>(world, rules, sharding) gives each rank's result, or
/// none where there are not as many devices; then the lines are left out.
template <class Engine>
std::vector<std::string> optimizer_lines(Engine& engine) {
  std::vector<std::string> result;
  for (const int world : {1, 3}) {
    for_each_optimizer([&]<class Rule, class Sharding, class Precision>(const std::string& name,
                                                                        const std::array<Rule, 2>& rules,
                                                                        const Sharding& sharding) {
      const std::vector<Trained> ranks =
          engine.template ranks<Rule, Sharding, Precision>(world, rules, sharding);
      for (const Trained& rank : ranks) {
        if (hash_of(rank.parameters) != hash_of(ranks[0].parameters) ||
            hash_of(rank.norms) != hash_of(ranks[0].norms)) {
          throw std::runtime_error(name + ": ranks differ");
        }
      }
      if (ranks.empty()) return;
      const std::string prefix = name + ".ranks_" + std::to_string(world);
      result.push_back(prefix + ".parameter " + hash_of(ranks[0].parameters));
      result.push_back(prefix + ".norm " + hash_of(ranks[0].norms));
    });
  }
  return result;
}

}  // namespace bits
