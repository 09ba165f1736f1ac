// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/float_environment.hpp>
#include <shardopt/devices/host_lanes.hpp>
#include <shardopt/devices/update.hpp>

#include <array>
#include <cstddef>
#include <cstdint>

namespace shardopt::inline v0::detail {

/// Loads and stores whole lanes or, in a run's last ones, the first `count`.
template <bool whole, class T>
SHARDOPT_TARGET_AVX2 inline __attribute__((always_inline)) Lanes load_lanes(const T* from,
                                                                            int count) noexcept {
  if constexpr (whole) {
    return load_pack(from);
  } else {
    return load_pack(from, count);
  }
}

template <bool whole, class T>
SHARDOPT_TARGET_AVX2 inline __attribute__((always_inline)) void store_lanes(T* to, Lanes value,
                                                                            int count) noexcept {
  if constexpr (whole) {
    store_pack(to, value);
  } else {
    store_pack(to, value, count);
  }
}

/// Updates `count` (at most `lanes`) elements from element `at` of a tile on.
template <bool whole, bool stateful, class Rule, class Precision>
SHARDOPT_TARGET_AVX2 inline __attribute__((always_inline)) void update_lanes(
    const UpdateArguments<Rule, Precision>& arguments, const Tile& tile,
    const typename Rule::Constants& constants, float factor, std::int64_t at, int count) noexcept {
  using Param = typename Precision::Param;
  using Grad = typename Precision::Grad;
  Param* parameter = static_cast<Param*>(tile.parameter) + at;
  auto* master = [&] {
    if constexpr (Precision::has_master) {
      return arguments.master + tile.state + at;
    } else {
      return parameter;
    }
  }();
  const Lanes gradient =
      math::mul(load_lanes<whole>(static_cast<const Grad*>(tile.gradient) + at, count), Lanes(factor));
  std::array<Lanes, state_count<Rule>> states;
  for (std::size_t k = 0; k < states.size(); ++k) {
    states[k] = stateful ? load_lanes<whole>(arguments.states[k] + tile.state + at, count) : Lanes(0.0f);
  }
  auto state = __builtin_bit_cast(typename Rule::template State<Lanes>, states);
  const Lanes updated = Rule::update(constants, load_lanes<whole>(master, count), gradient, state);
  states = __builtin_bit_cast(decltype(states), state);
  store_lanes<whole>(master, updated, count);
  if constexpr (Precision::has_master) store_lanes<whole>(parameter, updated, count);
  for (std::size_t k = 0; stateful && k < states.size(); ++k) {
    store_lanes<whole>(arguments.states[k] + tile.state + at, states[k], count);
  }
}

template <bool stateful, class Rule, class Precision>
SHARDOPT_TARGET_AVX2 void update_tiles(const UpdateArguments<Rule, Precision>& arguments) noexcept {
  const float factor = arguments.verdict->gradient_factor;
  for (std::int64_t k = 0; k < arguments.tile_count; ++k) {
    const Tile& tile = arguments.tiles[k];
    const typename Rule::Constants constants = arguments.constants[tile.group];
    const std::int64_t count = tile.count;
    std::int64_t at = 0;
    for (; at + lanes <= count; at += lanes)
      update_lanes<true, stateful>(arguments, tile, constants, factor, at, int{lanes});
    if (at < count)
      update_lanes<false, stateful>(arguments, tile, constants, factor, at, static_cast<int>(count - at));
  }
}

/// One bucket's update on the calling thread.
template <class Rule, class Precision>
void update_on_host(const UpdateArguments<Rule, Precision>& arguments) noexcept {
  if (arguments.verdict->go == 0) return;
  const FloatEnvironment environment;
  if constexpr (may_be_stateless<Rule>) {
    if (!arguments.stateful) return update_tiles<false>(arguments);
  }
  update_tiles<true>(arguments);
}

}  // namespace shardopt::inline v0::detail
