// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/rules/adam.hpp>
#include <shardopt/rules/adamw.hpp>
#include <shardopt/rules/sgd.hpp>
#include <support/foreign_policies.hpp>
#include <support/reference.hpp>

#include <vector>

namespace test {

/// Settings with two groups, "decay" and "plain", no hyper-parameter of which is equal: what the laws are
/// tested with.
template <class Rule>
[[nodiscard]] std::vector<Settings<Rule>> rule_cases();

template <>
[[nodiscard]] inline std::vector<Settings<so::AdamW>> rule_cases() {
  return {{.groups = {{"plain", {.lr = 2e-2, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0}},
                      {"decay", {.lr = 3e-3, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1}}},
           .max_norm = 20}};
}

template <>
[[nodiscard]] inline std::vector<Settings<so::Adam>> rule_cases() {
  return {{.groups = {{"decay", {.lr = 1e-2, .beta1 = 0.7, .beta2 = 0.9, .eps = 1e-5, .weight_decay = 0.05}},
                      {"plain", {.lr = 4e-3, .weight_decay = 0, .maximize = true}}},
           .max_norm = 20,
           .count_skipped = true}};
}

template <>
[[nodiscard]] inline std::vector<Settings<so::AdamWAmsgrad>> rule_cases() {
  return {{.groups = {{"plain", {.lr = 5e-3, .beta2 = 0.9, .weight_decay = 0.2}},
                      {"decay", {.lr = 1e-2, .beta1 = 0.5, .beta2 = 0.8}}},
           .max_norm = 20}};
}

/// Without momentum no state is kept; where one group has momentum, all have.
template <>
[[nodiscard]] inline std::vector<Settings<so::SGD>> rule_cases() {
  return {
      {.groups = {{"decay", {.lr = 0.1, .weight_decay = 0.02}}, {"plain", {.lr = 0.03, .maximize = true}}},
       .max_norm = 20},
      {.groups = {{"decay", {.lr = 0.1, .momentum = 0.9, .dampening = 0.3, .weight_decay = 0.02}},
                  {"plain", {.lr = 0.03, .momentum = 0.5}}},
       .max_norm = 20},
      {.groups = {{"plain", {.lr = 0.05, .momentum = 0.9, .nesterov = true}}, {"decay", {.lr = 0.02}}},
       .max_norm = 20}};
}

template <>
[[nodiscard]] inline std::vector<Settings<SignRule>> rule_cases() {
  return {{.groups = {{"decay", {.lr = 0.0625f, .decay = 0.75f}}, {"plain", {.lr = 0.01f, .decay = 0.5f}}},
           .max_norm = 20}};
}

}  // namespace test
