// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/dtype.hpp>

#include <concepts>
#include <string>
#include <type_traits>

namespace shardopt::inline v0 {

/// What is stored in which type: the engine's parameters and gradients, and the copy that the update works
/// on. States are fp32.
template <class Policy>
concept PrecisionPolicy = std::is_trivially_copyable_v<Policy> && requires {
  { DtypeOf<typename Policy::Param>::value } -> std::convertible_to<Dtype>;
  { DtypeOf<typename Policy::Grad>::value } -> std::convertible_to<Dtype>;
  { DtypeOf<typename Policy::Master>::value } -> std::convertible_to<Dtype>;
  {std::bool_constant<Policy::has_master>{}};
};

}  // namespace shardopt::inline v0
