// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/convert.hpp>
#include <shardopt/core/math.hpp>
#include <shardopt/core/tile.hpp>
#include <shardopt/devices/cuda_launch.cuh>
#include <shardopt/devices/update.hpp>

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace shardopt::inline v0::detail {

/// Elements that a thread loads and stores at once: 16 bytes of floats, 8 of 16-bit types.
inline constexpr std::uint32_t quad = 4;

/// Four neighbours, moved as one word where their address allows it.
template <class T>
struct alignas(quad * sizeof(T)) Quad {
  T elements[quad];
};

template <class T>
[[nodiscard]] __device__ __forceinline__ bool is_quad_aligned(const T* address) {
  return reinterpret_cast<std::uintptr_t>(address) % sizeof(Quad<T>) == 0;
}

template <class T>
__device__ __forceinline__ void load_quad(const T* from, bool aligned, float (&to)[quad]) {
  Quad<T> word;
  if (aligned) {
    word = *reinterpret_cast<const Quad<T>*>(from);
  } else {
    SHARDOPT_UNROLL
    for (std::uint32_t k = 0; k < quad; ++k) word.elements[k] = from[k];
  }
  SHARDOPT_UNROLL
  for (std::uint32_t k = 0; k < quad; ++k) to[k] = to_float(word.elements[k]);
}

template <class T>
__device__ __forceinline__ void store_quad(T* to, bool aligned, const float (&from)[quad]) {
  Quad<T> word;
  SHARDOPT_UNROLL
  for (std::uint32_t k = 0; k < quad; ++k) word.elements[k] = from_float<T>(from[k]);
  if (aligned) {
    *reinterpret_cast<Quad<T>*>(to) = word;
  } else {
    SHARDOPT_UNROLL
    for (std::uint32_t k = 0; k < quad; ++k) to[k] = word.elements[k];
  }
}

/// One tile's update by one block: the same operations on each element as on the host, in any order of
/// elements.
template <bool stateful, class Rule, class Precision>
struct TileUpdate {
  using Param = typename Precision::Param;
  using Grad = typename Precision::Grad;
  using State = typename Rule::template State<float>;
  static constexpr int states = stateful ? static_cast<int>(state_count<Rule>) : 0;

  const UpdateArguments<Rule, Precision>& arguments;
  const Tile& tile;
  const typename Rule::Constants& constants;
  float factor;

  /// The update of one element in registers. @param values  its states
  __device__ __forceinline__ float updated(float master, float gradient, float (&values)[states + 1]) const {
    State state{};
    if constexpr (states > 0) memcpy(&state, values, states * sizeof(float));
    const float result = Rule::update(constants, master, math::mul(gradient, factor), state);
    if constexpr (states > 0) memcpy(values, &state, states * sizeof(float));
    return result;
  }

  __device__ __forceinline__ void update_one(std::uint32_t at) const {
    Param* parameter = static_cast<Param*>(tile.parameter) + at;
    float values[states + 1];
    SHARDOPT_UNROLL
    for (int s = 0; s < states; ++s) values[s] = arguments.states[s][tile.state + at];
    const float gradient = to_float(static_cast<const Grad*>(tile.gradient)[at]);
    if constexpr (Precision::has_master) {
      float& master = arguments.master[tile.state + at];
      const float result = updated(master, gradient, values);
      master = result;
      *parameter = from_float<Param>(result);
    } else {
      *parameter = updated(*parameter, gradient, values);
    }
    SHARDOPT_UNROLL
    for (int s = 0; s < states; ++s) arguments.states[s][tile.state + at] = values[s];
  }

  /// Which buffers take whole words from some element on, the same for every quad of a tile.
  struct Alignment {
    bool parameter;
    bool gradient;
    bool state;
  };

  [[nodiscard]] __device__ __forceinline__ Alignment alignment_at(std::uint32_t head) const {
    bool state = true;
    SHARDOPT_UNROLL
    for (int s = 0; s < states; ++s)
      state = state && is_quad_aligned(arguments.states[s] + tile.state + head);
    if constexpr (Precision::has_master)
      state = state && is_quad_aligned(arguments.master + tile.state + head);
    return {is_quad_aligned(static_cast<const Param*>(tile.parameter) + head),
            is_quad_aligned(static_cast<const Grad*>(tile.gradient) + head), state};
  }

  __device__ __forceinline__ void update_quad(std::uint32_t at, Alignment aligned) const {
    Param* parameter = static_cast<Param*>(tile.parameter) + at;
    float master[quad];
    float gradient[quad];
    float values[states + 1][quad];
    if constexpr (Precision::has_master) {
      load_quad(arguments.master + tile.state + at, aligned.state, master);
    } else {
      load_quad(parameter, aligned.parameter, master);
    }
    load_quad(static_cast<const Grad*>(tile.gradient) + at, aligned.gradient, gradient);
    SHARDOPT_UNROLL
    for (int s = 0; s < states; ++s)
      load_quad(arguments.states[s] + tile.state + at, aligned.state, values[s]);
    SHARDOPT_UNROLL
    for (std::uint32_t k = 0; k < quad; ++k) {
      float own[states + 1];
      SHARDOPT_UNROLL
      for (int s = 0; s < states; ++s) own[s] = values[s][k];
      master[k] = updated(master[k], gradient[k], own);
      SHARDOPT_UNROLL
      for (int s = 0; s < states; ++s) values[s][k] = own[s];
    }
    if constexpr (Precision::has_master)
      store_quad(arguments.master + tile.state + at, aligned.state, master);
    store_quad(parameter, aligned.parameter, master);
    SHARDOPT_UNROLL
    for (int s = 0; s < states; ++s)
      store_quad(arguments.states[s] + tile.state + at, aligned.state, values[s]);
  }

  /// Elements before the first at which the buffers that move most, states and master (or parameters), take
  /// whole words.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t head() const {
    std::uintptr_t address = reinterpret_cast<std::uintptr_t>(tile.parameter) / sizeof(Param);
    if constexpr (Precision::has_master) {
      address = reinterpret_cast<std::uintptr_t>(arguments.master + tile.state) / sizeof(float);
    } else if constexpr (states > 0) {
      address = reinterpret_cast<std::uintptr_t>(arguments.states[0] + tile.state) / sizeof(float);
    }
    const std::uint32_t wanted = (quad - static_cast<std::uint32_t>(address % quad)) % quad;
    return wanted < tile.count ? wanted : tile.count;
  }

  __device__ __forceinline__ void run() const {
    const std::uint32_t first = head();
    const std::uint32_t quads = (tile.count - first) / quad;
    const Alignment aligned = alignment_at(first);
    for (std::uint32_t q = threadIdx.x; q < quads; q += blockDim.x) update_quad(first + quad * q, aligned);
    const std::uint32_t tail = tile.count - first - quad * quads;
    if (threadIdx.x < first) update_one(threadIdx.x);
    if (threadIdx.x < tail) update_one(tile.count - tail + threadIdx.x);
  }
};

/// A block a tile.
template <bool stateful, class Rule, class Precision>
__global__ void __launch_bounds__(block_threads)
    update_kernel(const __grid_constant__ UpdateArguments<Rule, Precision> arguments) {
  const StepVerdict verdict = *arguments.verdict;
  if (verdict.go == 0) return;
  const Tile tile = arguments.tiles[blockIdx.x];
  const typename Rule::Constants constants = arguments.constants[tile.group];
  TileUpdate<stateful, Rule, Precision>{arguments, tile, constants, verdict.gradient_factor}.run();
}

}  // namespace shardopt::inline v0::detail
