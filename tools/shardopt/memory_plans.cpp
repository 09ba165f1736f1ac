// SPDX-License-Identifier: Apache-2.0
#include "memory_plans.hpp"

#include "command.hpp"

#include <shardopt/shardopt.hpp>

#include <set>
#include <string>
#include <vector>

namespace tool {

namespace so = shardopt;

namespace {

template <class Rule, class Sharding, class Precision>
so::MemoryPlan plan(const so::ParameterTable& table, const PlanRequest& request, const Rule& rule) {
  using Optimizer = so::ZeroOptimizer<Rule, Sharding, so::Threads<so::Host>, Precision>;
  typename Optimizer::Config config;
  config.sharding.bucket_bytes = request.bucket_bytes;
  std::set<std::string> groups;
  for (const auto& entry : table.entries()) groups.insert(entry.group);
  config.groups.clear();
  for (const std::string& group : groups) config.groups.push_back({group, rule});
  return Optimizer::plan(table, config, {.rank = 0, .world = request.world});
}

template <class Rule, class Precision>
so::MemoryPlan with_sharding(const so::ParameterTable& table, const PlanRequest& request, const Rule& rule) {
  if (request.sharding == so::FlatSharding::name)
    return plan<Rule, so::FlatSharding, Precision>(table, request, rule);
  if (request.sharding == so::PerParameterSharding::name)
    return plan<Rule, so::PerParameterSharding, Precision>(table, request, rule);
  if (request.sharding == so::Replicated::name)
    return plan<Rule, so::Replicated, Precision>(table, request, rule);
  refuse_name("--sharding", request.sharding, sharding_names());
}

template <class Rule>
so::MemoryPlan with_precision(const so::ParameterTable& table, const PlanRequest& request, const Rule& rule) {
  const std::string& name = request.precision;
  if (name == "fp32") return with_sharding<Rule, so::FullPrecision>(table, request, rule);
  if (name == "bf16") return with_sharding<Rule, so::Mixed<so::bf16, so::bf16, float>>(table, request, rule);
  if (name == "bf16-fp32-grads")
    return with_sharding<Rule, so::Mixed<so::bf16, float, float>>(table, request, rule);
  if (name == "fp16") return with_sharding<Rule, so::Mixed<so::fp16, so::fp16, float>>(table, request, rule);
  if (name == "fp16-fp32-grads")
    return with_sharding<Rule, so::Mixed<so::fp16, float, float>>(table, request, rule);
  refuse_name("--precision", name, precision_names());
}

}  // namespace

const std::vector<std::string>& rule_names() {
  static const std::vector<std::string> names{"adamw",        "adam", "adamw-amsgrad",
                                              "adam-amsgrad", "sgd",  "sgd-momentum"};
  return names;
}

const std::vector<std::string>& precision_names() {
  static const std::vector<std::string> names{"fp32", "bf16", "bf16-fp32-grads", "fp16", "fp16-fp32-grads"};
  return names;
}

const std::vector<std::string>& sharding_names() {
  static const std::vector<std::string> names{std::string(so::FlatSharding::name),
                                              std::string(so::PerParameterSharding::name),
                                              std::string(so::Replicated::name)};
  return names;
}

std::string title_of_rule(const std::string& rule) {
  if (rule == "adamw") return "AdamW";
  if (rule == "adam") return "Adam";
  if (rule == "adamw-amsgrad") return "AdamW with AMSGrad";
  if (rule == "adam-amsgrad") return "Adam with AMSGrad";
  return rule == "sgd" ? "SGD" : "SGD with momentum";
}

std::string title_of_precision(const std::string& precision) {
  if (precision == "fp32") return "fp32";
  const std::string type = precision.substr(0, 4);
  return type + (precision.size() > 4 ? ", fp32 gradients and masters" : ", fp32 masters");
}

so::MemoryPlan memory_plan(const so::ParameterTable& table, const PlanRequest& request) {
  const std::string& rule = request.rule;
  if (rule == "adamw") return with_precision(table, request, so::AdamW{});
  if (rule == "adam") return with_precision(table, request, so::Adam{});
  if (rule == "adamw-amsgrad") return with_precision(table, request, so::AdamWAmsgrad{});
  if (rule == "adam-amsgrad") return with_precision(table, request, so::AdamAmsgrad{});
  if (rule == "sgd") return with_precision(table, request, so::SGD{});
  if (rule == "sgd-momentum") return with_precision(table, request, so::SGD{.momentum = 0.9});
  refuse_name("--rule", rule, rule_names());
}

}  // namespace tool
