// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/precision/precision_policy.hpp>

#include <type_traits>

namespace shardopt::inline v0 {

/// Parameters, gradients and masters of given types.
///
/// Where parameters are stored in 16 bits, a rank keeps an fp32 copy of its own shard (master weights:
/// Micikevicius et al. 2018, "Mixed Precision Training") and rounds it to nearest even after each update.
/// fp32 parameters are their own master.
template <class ParamType, class GradType, class MasterType>
struct Mixed {
  using Param = ParamType;    ///< of the engine's parameters
  using Grad = GradType;      ///< of the engine's gradients, and on the wire
  using Master = MasterType;  ///< of what the update reads and writes

  static_assert(std::is_same_v<Master, float>,
                "shardopt: the update works on fp32 masters: Mixed<Param, Grad, float>");
  /// Whether masters are kept beside the parameters.
  static constexpr bool has_master = !std::is_same_v<Param, Master>;
};

/// Everything in fp32; no masters.
using FullPrecision = Mixed<float, float, float>;

static_assert(PrecisionPolicy<FullPrecision>);
static_assert(PrecisionPolicy<Mixed<bf16, bf16, float>> && PrecisionPolicy<Mixed<bf16, float, float>>);
static_assert(PrecisionPolicy<Mixed<fp16, fp16, float>> && PrecisionPolicy<Mixed<fp16, float, float>>);

}  // namespace shardopt::inline v0
