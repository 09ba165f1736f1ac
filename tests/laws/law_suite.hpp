// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>
#include <shardopt/precision/mixed.hpp>
#include <shardopt/sharding/flat_sharding.hpp>
#include <shardopt/sharding/per_parameter_sharding.hpp>
#include <shardopt/sharding/replicated.hpp>
#include <support/rule_cases.hpp>
#include <support/training.hpp>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

/// The laws that one training run shows, over policies, precisions, world sizes and sizes: each rule has a
/// test program's file of its own that instantiates this.
namespace test {

using Fp32 = so::FullPrecision;
using Bf16 = so::Mixed<so::bf16, so::bf16, float>;
using Bf16Fp32 = so::Mixed<so::bf16, float, float>;
using Fp16 = so::Mixed<so::fp16, so::fp16, float>;
using Fp16Fp32 = so::Mixed<so::fp16, float, float>;

template <class ShardingPolicy, class PrecisionPolicy>
struct Combination {
  using Sharding = ShardingPolicy;
  using Precision = PrecisionPolicy;
};

/// Each policy with fp32, each precision with some policy.
using Combinations =
    std::tuple<Combination<so::FlatSharding, Fp32>, Combination<so::PerParameterSharding, Bf16>,
               Combination<so::Replicated, Bf16Fp32>, Combination<ScatterSharding, Fp16>,
               Combination<so::PerParameterSharding, Fp32>>;
/// The others that differ.
using MoreCombinations =
    std::tuple<Combination<so::FlatSharding, Bf16>, Combination<so::FlatSharding, Fp16Fp32>,
               Combination<so::PerParameterSharding, Bf16Fp32>, Combination<so::PerParameterSharding, Fp16>,
               Combination<so::Replicated, Fp32>, Combination<so::Replicated, Fp16>,
               Combination<ScatterSharding, Fp32>, Combination<ScatterSharding, Bf16Fp32>>;

/// A policy with its n-th setting: one tiny bucket a grain, buckets that cut tensors, everything in one.
template <class Sharding>
[[nodiscard]] Sharding sharding_with(int n) {
  if constexpr (requires(Sharding s) { s.bucket_bytes; }) {
    constexpr std::int64_t bytes[] = {1, 5000, std::int64_t{32} << 20};
    return {.bucket_bytes = bytes[n % 3]};
  } else {
    return {.grains = 1 + 2 * n};
  }
}

/// The i-th of the memory kinds.
[[nodiscard]] inline MemoryKind memory_kind(int i) {
  constexpr MemoryKind kinds[] = {MemoryKind::own, MemoryKind::arena, MemoryKind::adopted};
  return kinds[i % 3];
}

/// How a workload is varied so that worlds and policies do not all meet the same one.
[[nodiscard]] inline Workload varied(Workload work, int n) {
  work.gradients = n % 2 == 0 ? Gradients::ranked : Gradients::exact;
  work.reversed = n % 3 == 1;
  work.separate = n % 4 == 3;
  work.misaligned = n % 2;
  return work;
}

/// The reference must show what the laws are about, or the test tests nothing.
template <class Rule, class Precision>
void require_telling(const Reference<Rule, Precision>& plain) {
  int skipped = 0;
  int clipped = 0;
  int unclipped = 0;
  for (const auto& step : plain.steps) {
    skipped += step.skipped ? 1 : 0;
    clipped += !step.skipped && step.clip_factor < 1 ? 1 : 0;
    unclipped += !step.skipped && step.clip_factor == 1 ? 1 : 0;
  }
  REQUIRE(plain.steps.size() >= 12);
  REQUIRE(skipped >= 2);
  REQUIRE(clipped >= 2);
  REQUIRE(unclipped >= 2);
}

/// The promised bits against doubles by the definition.
template <class Rule, class Precision>
void require_near_doubles(const Reference<Rule, Precision>& plain) {
  for (std::size_t k = 0; k < plain.precise.size(); ++k) {
    const auto is = static_cast<double>(plain.steps.back().master[k]);
    if (std::fabs(is - plain.precise[k]) > 4e-6 * (1 + std::fabs(plain.precise[k]))) {
      FAIL("flat element " << k << " is " << is << ", in doubles " << plain.precise[k]);
    }
  }
}

/// One world size, awkward tensors, one variation of everything else.
template <class World, class Rule, class Pair>
void require_laws(int world, int variation) {
  using Precision = typename Pair::Precision;
  for (const Settings<Rule>& settings : rule_cases<Rule>()) {
    const Workload work = varied(awkward_workload(), variation);
    const Reference<Rule, Precision> plain(work, settings, world);
    require_telling(plain);
    require_near_doubles(plain);
    const auto sharding = sharding_with<typename Pair::Sharding>(variation);
    CAPTURE(world, variation, settings.groups[0].name);
    REQUIRE(differences<World>(work, plain, settings, sharding, world, {.memory = memory_kind(variation)}) ==
            "");
    ++variation;
  }
}

/// Single tensors of the sizes around which cuts fall.
template <class World, class Rule, class Pair>
void require_laws_of_sizes(int world) {
  using Precision = typename Pair::Precision;
  const Settings<Rule> settings = rule_cases<Rule>().back();
  int variation = world;
  for (const std::int64_t numel :
       {0, 1, world - 1, world + 1, 255, 256, 257, world * 256 - 1, world * 256 + 1, 2047, 2049, 3511}) {
    const Workload work = varied(single_tensor(numel), variation);
    const Reference<Rule, Precision> plain(work, settings, world);
    CAPTURE(world, numel, variation);
    const auto sharding = sharding_with<typename Pair::Sharding>(variation);
    REQUIRE(differences<World>(work, plain, settings, sharding, world, {.memory = memory_kind(variation)}) ==
            "");
    ++variation;
  }
}

}  // namespace test
