// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/parameter_table.hpp>
#include <shardopt/zero/memory_plan.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace tool {

/// What a plan is asked for, by the names of the command line.
struct PlanRequest {
  std::string rule;       ///< "adamw", "sgd-momentum", …
  std::string precision;  ///< "fp32", "bf16", "bf16-fp32-grads", …
  std::string sharding = "flat";
  std::int64_t bucket_bytes = std::int64_t{32} << 20;
  int world = 1;
};

/// The names that are known, in the order of the manual.
[[nodiscard]] const std::vector<std::string>& rule_names();
[[nodiscard]] const std::vector<std::string>& precision_names();
[[nodiscard]] const std::vector<std::string>& sharding_names();

/// "AdamW", "SGD with momentum", …
[[nodiscard]] std::string title_of_rule(const std::string& rule);
/// "bf16, fp32 gradients"
[[nodiscard]] std::string title_of_precision(const std::string& precision);

/// The library's own plan for rank 0. @throws UsageError for names that are not known
[[nodiscard]] shardopt::MemoryPlan memory_plan(const shardopt::ParameterTable& table,
                                               const PlanRequest& request);

}  // namespace tool
