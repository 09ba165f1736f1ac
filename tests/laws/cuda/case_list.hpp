// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <laws/cuda/cases.hpp>

#include <vector>

namespace test {

/// All cases, in the order of cases.hpp: precision by precision.
[[nodiscard]] inline const std::vector<NamedCase>& cases() {
#define SHARDOPT_TEST_LIST(tag, rule, sharding, precision)                             \
  NamedCase{#tag " " #sharding " " #precision, Case<rule, sharding, precision>::types, \
            run_on_host<Case<rule, sharding, precision>>, run_on_nccl<Case<rule, sharding, precision>>},
  static const std::vector<NamedCase> list{SHARDOPT_TEST_CASES(SHARDOPT_TEST_LIST)};
#undef SHARDOPT_TEST_LIST
  return list;
}

/// One of them by its types.
template <class Rule, class Sharding, class Precision>
[[nodiscard]] NamedCase case_of() {
  using C = Case<Rule, Sharding, Precision>;
  return {"", C::types, run_on_host<C>, run_on_nccl<C>};
}

}  // namespace test
