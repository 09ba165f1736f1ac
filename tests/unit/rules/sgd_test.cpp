// SPDX-License-Identifier: Apache-2.0
#include <shardopt/rules/sgd.hpp>
//
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_floating_point.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "drive.hpp"

namespace so = shardopt;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::MessageMatches;
using Catch::Matchers::WithinAbs;

namespace {

/// PyTorch's SGD in double.
struct SgdReference {
  so::SGD rule;
  double p;
  double buffer = 0.0;
  bool has_buffer = false;

  void step(double g, double lr_factor) {
    if (rule.maximize) g = -g;
    g += rule.weight_decay * p;
    if (rule.momentum != 0.0) {
      buffer = has_buffer ? rule.momentum * buffer + (1.0 - rule.dampening) * g : g;
      has_buffer = true;
      g = rule.nesterov ? g + rule.momentum * buffer : buffer;
    }
    p -= rule.lr * lr_factor * g;
  }
};

}  // namespace

TEST_CASE("SGD follows its definition in double precision", "[rules][host]") {
  const double momentum = GENERATE(0.0, 0.9);
  const double dampening = GENERATE(0.0, 0.4);
  const bool nesterov = GENERATE(false, true);
  const double weight_decay = GENERATE(0.0, 0.1);
  const bool maximize = GENERATE(false, true);
  if (nesterov && (momentum == 0.0 || dampening != 0.0)) return;
  CAPTURE(momentum, dampening, nesterov, weight_decay, maximize);
  const so::SGD rule{.lr = 0.02,
                     .momentum = momentum,
                     .dampening = dampening,
                     .weight_decay = weight_decay,
                     .nesterov = nesterov,
                     .maximize = maximize};
  constexpr std::size_t count = 67;
  drive::Elements<so::SGD> elements(drive::parameters(count));
  std::vector<SgdReference> references;
  for (const float p : elements.parameters) references.push_back({rule, static_cast<double>(p)});
  double largest = 1.0;
  for (std::uint64_t t = 1; t <= 30; ++t) {
    const auto g = drive::gradients(count, t);
    const float factor = drive::schedule(t);
    drive::step(drive::By::packs, rule, {factor, t}, elements, g);
    for (std::size_t k = 0; k < count; ++k) {
      references[k].step(static_cast<double>(g[k]), static_cast<double>(factor));
      largest = std::fmax(largest, std::fabs(references[k].p) + std::fabs(references[k].buffer));
      CAPTURE(t, k);
      REQUIRE_THAT(static_cast<double>(elements.parameters[k]),
                   WithinAbs(references[k].p, 0x1p-24 * largest * static_cast<double>(t)));
    }
  }
}

TEST_CASE("SGD gives the same bits by floats and by packs", "[rules][host]") {
  REQUIRE(drive::floats_and_packs_agree(so::SGD{}));
  REQUIRE(drive::floats_and_packs_agree(so::SGD{.momentum = 0.9, .dampening = 0.3, .weight_decay = 0.01}));
  REQUIRE(
      drive::floats_and_packs_agree(so::SGD{.lr = 0.1, .momentum = 0.9, .nesterov = true, .maximize = true}));
}

TEST_CASE("The first update sets the momentum buffer to the gradient, without dampening", "[rules][host]") {
  const so::SGD rule{.lr = 1.0, .momentum = 0.5, .dampening = 0.75};
  drive::Elements<so::SGD> elements({0.0f});
  drive::step(drive::By::packs, rule, {.update = 1}, elements, {8.0f});
  REQUIRE(elements.state[0][0] == 8.0f);
  REQUIRE(elements.parameters[0] == -8.0f);
  drive::step(drive::By::packs, rule, {.update = 2}, elements, {8.0f});
  REQUIRE(elements.state[0][0] == 6.0f);  // 0.5 · 8 + 0.25 · 8
  REQUIRE(elements.parameters[0] == -14.0f);
}

TEST_CASE("The first gradient is the momentum buffer whenever it comes, as in PyTorch", "[rules][host]") {
  const so::SGD rule{.lr = 1.0, .momentum = 0.5, .dampening = 0.75};
  drive::Elements<so::SGD> elements({0.0f, 0.0f});
  drive::step(drive::By::packs, rule, {.update = 7}, elements, {8.0f, 0.0f});  // skipped steps were counted
  REQUIRE(elements.state[0][0] == 8.0f);
  REQUIRE(elements.state[0][1] == 0.0f);
  // A gradient of zero was one, too: what comes then is dampened.
  drive::step(drive::By::packs, rule, {.update = 8}, elements, {8.0f, 8.0f});
  REQUIRE(elements.state[0][0] == 6.0f);
  REQUIRE(elements.state[0][1] == 2.0f);
}

TEST_CASE("Momentum that is switched on later begins with the gradient; switched off, its buffer stays",
          "[rules][host]") {
  const so::SGD without{.lr = 1.0};
  const so::SGD with{.lr = 1.0, .momentum = 0.5};
  drive::Elements<so::SGD> elements({0.0f});
  drive::step(drive::By::packs, without, {.update = 1}, elements, {8.0f});
  REQUIRE(elements.parameters[0] == -8.0f);
  drive::step(drive::By::packs, with, {.update = 2}, elements, {1.0f});
  REQUIRE(elements.parameters[0] == -9.0f);
  drive::step(drive::By::packs, without, {.update = 3}, elements, {4.0f});
  REQUIRE(elements.parameters[0] == -13.0f);
  drive::step(drive::By::packs, with, {.update = 4}, elements, {1.0f});
  REQUIRE(elements.parameters[0] == -14.5f);  // 0.5 · 1 + 1
}

TEST_CASE("A momentum buffer that is infinite does no harm once momentum is off", "[rules][host]") {
  const so::SGD rule{.lr = 1.0};
  drive::Elements<so::SGD> elements({0.0f});
  elements.state[0][0] = HUGE_VALF;
  drive::step(drive::By::packs, rule, {.update = 9}, elements, {2.0f});
  REQUIRE(elements.parameters[0] == -2.0f);
}

TEST_CASE("A learning rate beyond what a float holds moves nothing where the gradient is zero",
          "[rules][host]") {
  for (const so::SGD& rule : {so::SGD{.lr = 3e38}, so::SGD{.lr = 3e38, .momentum = 0.9}}) {
    drive::Elements<so::SGD> elements({1.0f, 1.0f});
    drive::step(drive::By::packs, rule, {.lr_factor = 10.0f, .update = 1}, elements, {0.0f, 0.25f});
    REQUIRE(elements.parameters[0] == 1.0f);
    REQUIRE(elements.parameters[1] < -8e37f);
  }
}

TEST_CASE("Nesterov's step looks ahead", "[rules][host]") {
  const so::SGD rule{.lr = 1.0, .momentum = 0.5, .nesterov = true};
  drive::Elements<so::SGD> elements({0.0f});
  drive::step(drive::By::packs, rule, {.update = 1}, elements, {8.0f});
  REQUIRE(elements.parameters[0] == -12.0f);  // 8 + 0.5 · 8
  REQUIRE(elements.state[0][0] == 8.0f);
}

TEST_CASE("Without momentum SGD keeps no state, and dampening has no effect", "[rules][host]") {
  REQUIRE(so::stateless(so::SGD{}));
  REQUIRE_FALSE(so::stateless(so::SGD{.momentum = 0.1}));
  const so::SGD rule{.lr = 1.0, .dampening = 0.5};
  drive::Elements<so::SGD> elements({0.0f});
  for (std::uint64_t t = 1; t <= 3; ++t) {
    elements.state[0][0] = 0.0f;  // what a kernel without state hands in
    drive::step(drive::By::packs, rule, {.update = t}, elements, {2.0f});
  }
  REQUIRE(elements.parameters[0] == -6.0f);
}

TEST_CASE("SGD's hyper-parameters not given are PyTorch's", "[rules][host]") {
  const so::SGD rule{};
  REQUIRE(rule.lr == 1e-3);
  REQUIRE(rule.momentum == 0.0);
  REQUIRE(rule.dampening == 0.0);
  REQUIRE(rule.weight_decay == 0.0);
  REQUIRE_FALSE(rule.nesterov);
  REQUIRE_FALSE(rule.maximize);
}

TEST_CASE("SGD's hyper-parameters out of range are refused by name", "[rules][host]") {
  const auto refused = [](const so::SGD& rule, const std::string& text) {
    REQUIRE_THROWS_MATCHES(so::validate(rule), std::invalid_argument,
                           MessageMatches(ContainsSubstring(text)));
  };
  for (const double bad : {-1e-9, std::nan(""), HUGE_VAL, 1e39}) {
    refused({.lr = bad}, "sgd: lr is ");
    refused({.momentum = bad}, "momentum is ");
    refused({.weight_decay = bad}, "weight_decay is ");
  }
  refused({.dampening = std::nan("")}, "dampening is NaN");
  refused({.dampening = -1e39}, "finite, as a float too");
  refused({.nesterov = true}, "nesterov needs momentum > 0 and dampening 0");
  refused({.momentum = 0.9, .dampening = 0.1, .nesterov = true},
          "nesterov needs momentum > 0 and dampening 0");
  REQUIRE_NOTHROW(so::validate(so::SGD{}));
  REQUIRE_NOTHROW(so::validate(so::SGD{.momentum = 0.9, .nesterov = true}));
  REQUIRE_NOTHROW(so::validate(so::SGD{.momentum = 0.9, .dampening = 0.5}));
}
