// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/convert.hpp>
#include <shardopt/core/math.hpp>
#include <shardopt/core/pack_memory.hpp>

#include <cstdint>

namespace shardopt::inline v0 {

// What the host's kernels compute on: packs of eight floats, or single ones where there are no packs.

#if SHARDOPT_HOST_AVX2

namespace detail {
using Lanes = Pack;
inline constexpr std::int64_t lanes = Pack::size;
}  // namespace detail

#else

namespace detail {
using Lanes = float;
inline constexpr std::int64_t lanes = 1;
}  // namespace detail

template <class T>
inline float load_pack(const T* from) noexcept {
  return to_float(*from);
}
template <class T>
inline float load_pack(const T* from, int count) noexcept {
  return count > 0 ? to_float(*from) : 0.0f;
}
template <class T>
inline void store_pack(T* to, float value) noexcept {
  *to = from_float<T>(value);
}
template <class T>
inline void store_pack(T* to, float value, int count) noexcept {
  if (count > 0) *to = from_float<T>(value);
}

#endif

}  // namespace shardopt::inline v0
