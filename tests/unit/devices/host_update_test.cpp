// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <shardopt/devices/host.hpp>
#include <shardopt/precision/mixed.hpp>
#include <support/numbers.hpp>
#include <support/plain_rules.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

using namespace test;

TEMPLATE_TEST_CASE("Elements are updated one by one whatever the length of a tile, and nothing beside them",
                   "[devices][host]", so::FullPrecision, (so::Mixed<so::bf16, float, float>),
                   (so::Mixed<so::fp16, so::fp16, float>)) {
  using Param = typename TestType::Param;
  using Grad = typename TestType::Grad;
  const std::uint32_t count = GENERATE(1U, 7U, 8U, 9U, 255U, 2048U);
  const std::size_t shift = GENERATE(0U, 1U, 5U);
  const bool go = GENERATE(true, false);
  CAPTURE(count, shift, go);
  const SignRule rule{.lr = 0.25f, .decay = 0.5f};
  const std::size_t size = count + shift + 3;
  std::vector<Param> parameters(size);
  std::vector<Grad> gradients(size);
  std::vector<float> mean(size, 0.5f);
  std::vector<float> visits(size, 2.0f);
  std::vector<float> master(size);
  for (std::size_t i = 0; i < size; ++i) {
    parameters[i] = rounded<Param>(static_cast<double>(noise(i) % 100) / 10);
    gradients[i] = rounded<Grad>(static_cast<double>(noise(i, 1) % 100) / 10 - 5);
    master[i] = static_cast<float>(value_of(parameters[i]));
  }
  const auto old_parameters = parameters;
  const auto old_gradients = gradients;
  const so::Tile tile{.parameter = parameters.data() + shift,
                      .gradient = gradients.data() + shift,
                      .state = 2,
                      .count = count,
                      .group = 1,
                      .phase = 0};
  const SignRule::Constants constants[2] = {{}, rule.constants({})};
  const so::StepVerdict verdict{.gradient_factor = 0.75f, .go = go ? 1U : 0U};
  so::UpdateArguments<SignRule, TestType> arguments{.tiles = &tile,
                                                    .tile_count = 1,
                                                    .states = {mean.data(), visits.data(), nullptr},
                                                    .master = master.data(),
                                                    .constants = constants,
                                                    .verdict = &verdict,
                                                    .stateful = true};
  // Masters stand at the tile's place in the state buffers.
  if (TestType::has_master) {
    for (std::uint32_t i = 0; i < count; ++i)
      master[2 + i] = static_cast<float>(value_of(parameters[shift + i]));
  }
  so::Host{}.update(arguments, {});
  for (std::size_t i = 0; i < size; ++i) {
    const bool inside = go && i >= shift && i < shift + count;
    float state[2] = {0.5f, 2.0f};
    const auto old = static_cast<float>(value_of(old_parameters[i]));
    const float updated =
        inside ? PlainRule<SignRule>::update<float>(
                     rule, 1.0, 1, old, static_cast<float>(value_of(old_gradients[i])) * 0.75f, state)
               : old;
    REQUIRE(bits_of(parameters[i]) == bits_of(rounded<Param>(static_cast<double>(updated))));
    REQUIRE(bits_of(gradients[i]) == bits_of(old_gradients[i]));
    if (!inside) continue;
    REQUIRE(mean[2 + i - shift] == state[0]);
    REQUIRE(visits[2 + i - shift] == 3.0f);
    if (TestType::has_master) REQUIRE(master[2 + i - shift] == updated);
  }
  for (const std::size_t outside : {std::size_t{0}, std::size_t{1}, std::size_t{2} + count}) {
    if (outside < size) CHECK(visits[outside] == 2.0f);
  }
}

TEST_CASE("A rule without state reads and writes none", "[devices][host]") {
  std::vector<float> parameters(9, 1.0f);
  std::vector<float> gradients(9, 2.0f);
  const so::Tile tile{.parameter = parameters.data(),
                      .gradient = gradients.data(),
                      .state = 0,
                      .count = 9,
                      .group = 0,
                      .phase = 0};
  const auto constants = so::SGD{.lr = 0.25}.constants({});
  const so::StepVerdict verdict{.gradient_factor = 1, .go = 1};
  so::Host{}.update(so::UpdateArguments<so::SGD, so::FullPrecision>{.tiles = &tile,
                                                                    .tile_count = 1,
                                                                    .states = {},
                                                                    .master = nullptr,
                                                                    .constants = &constants,
                                                                    .verdict = &verdict,
                                                                    .stateful = false},
                    {});
  CHECK(parameters == std::vector<float>(9, 0.5f));
}
