// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/math.hpp>
#include <shardopt/core/pack_memory.hpp>
#include <shardopt/rules/fields.hpp>
#include <shardopt/rules/rule.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "../core/awkward_floats.hpp"

namespace drive {

/// Parameters and state buffers that a rule works on.
template <class Rule>
struct Elements {
  std::vector<float> parameters;
  std::array<std::vector<float>, shardopt::state_count<Rule>> state;

  explicit Elements(std::vector<float> initial) : parameters(std::move(initial)) {
    for (auto& buffer : state) buffer.assign(parameters.size(), 0.0f);
  }
};

namespace detail {

template <class Rule, std::size_t... index>
SHARDOPT_TARGET_AVX2 void step_floats(const typename Rule::Constants& constants, Elements<Rule>& elements,
                                      const std::vector<float>& gradients, std::index_sequence<index...>) {
  for (std::size_t k = 0; k < gradients.size(); ++k) {
    typename Rule::template State<float> state{elements.state[index][k]...};
    elements.parameters[k] =
        Rule::template update<float>(constants, elements.parameters[k], gradients[k], state);
    ((elements.state[index][k] = shardopt::field<index>(state)), ...);
  }
}

#if SHARDOPT_HOST_AVX2
template <class Rule, std::size_t... index>
SHARDOPT_TARGET_AVX2 void step_packs(const typename Rule::Constants& constants, Elements<Rule>& elements,
                                     const std::vector<float>& gradients, std::index_sequence<index...>) {
  using shardopt::Pack;
  for (std::size_t k = 0; k < gradients.size(); k += Pack::size) {
    const int count = static_cast<int>((std::min)(gradients.size() - k, std::size_t{Pack::size}));
    typename Rule::template State<Pack> state{
        shardopt::load_pack(elements.state[index].data() + k, count)...};
    float* parameters = elements.parameters.data() + k;
    const Pack updated = Rule::template update<Pack>(constants, shardopt::load_pack(parameters, count),
                                                     shardopt::load_pack(gradients.data() + k, count), state);
    shardopt::store_pack(parameters, updated, count);
    (shardopt::store_pack(elements.state[index].data() + k, shardopt::field<index>(state), count), ...);
  }
}
#endif

}  // namespace detail

/// How the loop goes over the elements.
enum class By { floats, packs };

/// One update of all elements.
template <class Rule>
void step(By by, const Rule& rule, shardopt::StepScalars scalars, Elements<Rule>& elements,
          const std::vector<float>& gradients) {
  const auto constants = rule.constants(scalars);
  constexpr auto indices = std::make_index_sequence<shardopt::state_count<Rule>>{};
#if SHARDOPT_HOST_AVX2
  if (by == By::packs) return detail::step_packs<Rule>(constants, elements, gradients, indices);
#endif
  static_cast<void>(by);
  detail::step_floats<Rule>(constants, elements, gradients, indices);
}

/// One element through some updates with the same gradient: the parameter and its state afterwards.
template <class Rule>
Elements<Rule> one_element(const Rule& rule, float parameter, float gradient, std::uint64_t updates = 1) {
  Elements<Rule> elements({parameter});
  for (std::uint64_t t = 1; t <= updates; ++t) step(By::packs, rule, {.update = t}, elements, {gradient});
  return elements;
}

/// A learning-rate factor that changes from step to step.
inline float schedule(std::uint64_t update) { return 1.0f / (1.0f + 0.25f * static_cast<float>(update % 5)); }

/// Gradients of one update: of magnitude 2^-8 to 2^8, a tenth of them zero, all zero in the fourth.
inline std::vector<float> gradients(std::size_t count, std::uint64_t update) {
  awkward::Random random(100 + update);
  std::vector<float> result(count);
  for (float& value : result) value = update == 4 || random.bits32() % 10 == 0 ? 0.0f : random.usual();
  return result;
}

inline std::vector<float> parameters(std::size_t count) {
  awkward::Random random(7);
  std::vector<float> result(count);
  for (float& value : result) value = random.usual();
  return result;
}

/// Twelve updates of 101 elements (no multiple of the pack) by floats and by packs: the two must agree in
/// every bit.
template <class Rule>
bool floats_and_packs_agree(const Rule& rule) {
  Elements<Rule> one(parameters(101));
  Elements<Rule> two(parameters(101));
  for (std::uint64_t t = 1; t <= 12; ++t) {
    auto g = gradients(101, t);
    g[3] = 1e-42f;  // below the normal numbers
    g[5] = 3e38f;
    if (t > 8) g[7] = awkward::specials()[45];  // an infinity or NaN spoils its own element only
    step(By::floats, rule, {schedule(t), t}, one, g);
    step(By::packs, rule, {schedule(t), t}, two, g);
  }
  const auto equal = [](const std::vector<float>& a, const std::vector<float>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](float x, float y) { return awkward::same(x, y); });
  };
  bool agree = equal(one.parameters, two.parameters);
  for (std::size_t s = 0; s < one.state.size(); ++s) agree = agree && equal(one.state[s], two.state[s]);
  return agree;
}

}  // namespace drive
