// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/config.hpp>
#include <shardopt/core/dtype.hpp>
#include <shardopt/core/math.hpp>

#if SHARDOPT_HOST_AVX2

#include <immintrin.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace shardopt::inline v0 {

// nvcc's device pass reads host functions too, with Pack as an array (see pack.hpp): there they have no body.

namespace detail {

#if !defined(__CUDA_ARCH__)

/// All ones in the first `count` lanes.
[[nodiscard]] SHARDOPT_TARGET_AVX2 inline __attribute__((always_inline)) __m256i first_lanes(
    int count) noexcept {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

[[nodiscard]] SHARDOPT_TARGET_AVX2 inline __attribute__((always_inline)) Pack pack_of_bf16(
    __m128i halves) noexcept {
  return Pack(reinterpret_cast<PackFloats>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16)));
}

[[nodiscard]] SHARDOPT_TARGET_AVX2 inline __attribute__((always_inline)) Pack pack_of_fp16(
    __m128i halves) noexcept {
  return Pack(PackFloats(_mm256_cvtph_ps(halves)));
}

/// Eight bf16, rounded to nearest even, canonical NaN.
[[nodiscard]] SHARDOPT_TARGET_AVX2 inline __attribute__((always_inline)) __m128i bf16_of_pack(
    Pack pack) noexcept {
  __m256i bits = _mm256_castps_si256(pack.v);
  asm("" : "+x"(bits));  // see math::is_finite
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
  const __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
  const __m256i upper = _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), _mm256_set1_epi32(0x7fc0), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
}

/// Eight fp16, rounded to nearest even, canonical NaN.
[[nodiscard]] SHARDOPT_TARGET_AVX2 inline __attribute__((always_inline)) __m128i fp16_of_pack(
    Pack pack) noexcept {
  __m128i halves = _mm256_cvtps_ph(pack.v, _MM_FROUND_TO_NEAREST_INT);
  asm("" : "+x"(halves));
  const __m128i magnitude = _mm_and_si128(halves, _mm_set1_epi16(0x7fff));
  const __m128i nan = _mm_cmpgt_epi16(magnitude, _mm_set1_epi16(0x7c00));
  return _mm_blendv_epi8(halves, _mm_set1_epi16(0x7e00), nan);
}

#endif

}  // namespace detail

/// Reads eight elements (float, or a 16-bit type known to DtypeOf) from an address of any alignment.
template <class T>
[[nodiscard]] SHARDOPT_TARGET_AVX2 inline __attribute__((always_inline)) Pack load_pack(
    const T* from) noexcept {
#if defined(__CUDA_ARCH__)
  return Pack{};
#else
  if constexpr (dtype_of<T> == Dtype::fp32) {
    return Pack(detail::PackFloats(_mm256_loadu_ps(from)));
  } else {
    static_assert(dtype_of<T> == Dtype::bf16 || dtype_of<T> == Dtype::fp16);
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i_u*>(from));
    return dtype_of<T> == Dtype::bf16 ? detail::pack_of_bf16(halves) : detail::pack_of_fp16(halves);
  }
#endif
}

/// Reads the first `count` (0 to 8) elements; the other lanes are 0 and their memory is not touched.
template <class T>
[[nodiscard]] SHARDOPT_TARGET_AVX2 inline __attribute__((always_inline)) Pack load_pack(const T* from,
                                                                                        int count) noexcept {
#if defined(__CUDA_ARCH__)
  return Pack{};
#else
  if constexpr (dtype_of<T> == Dtype::fp32) {
    return Pack(detail::PackFloats(_mm256_maskload_ps(from, detail::first_lanes(count))));
  } else {
    T elements[Pack::size] = {};
    std::memcpy(static_cast<void*>(elements), from, static_cast<std::size_t>(count) * sizeof(T));
    return load_pack(static_cast<const T*>(elements));
  }
#endif
}

/// Writes eight elements, each rounded once as by from_float, to an address of any alignment.
template <class T>
SHARDOPT_TARGET_AVX2 inline __attribute__((always_inline)) void store_pack(T* to, Pack pack) noexcept {
#if !defined(__CUDA_ARCH__)
  if constexpr (dtype_of<T> == Dtype::fp32) {
    _mm256_storeu_ps(to, pack.v);
  } else {
    static_assert(dtype_of<T> == Dtype::bf16 || dtype_of<T> == Dtype::fp16);
    _mm_storeu_si128(reinterpret_cast<__m128i_u*>(to),
                     dtype_of<T> == Dtype::bf16 ? detail::bf16_of_pack(pack) : detail::fp16_of_pack(pack));
  }
#endif
}

/// Writes the first `count` (0 to 8) lanes; no other memory is touched.
template <class T>
SHARDOPT_TARGET_AVX2 inline __attribute__((always_inline)) void store_pack(T* to, Pack pack,
                                                                           int count) noexcept {
#if !defined(__CUDA_ARCH__)
  if constexpr (dtype_of<T> == Dtype::fp32) {
    _mm256_maskstore_ps(to, detail::first_lanes(count), pack.v);
  } else {
    T elements[Pack::size];
    store_pack(static_cast<T*>(elements), pack);
    std::memcpy(static_cast<void*>(to), elements, static_cast<std::size_t>(count) * sizeof(T));
  }
#endif
}

/// How many lanes of the mask hold.
[[nodiscard]] SHARDOPT_TARGET_AVX2 inline __attribute__((always_inline)) int count_lanes(
    PackMask mask) noexcept {
#if defined(__CUDA_ARCH__)
  return 0;
#else
  const auto signs = _mm256_movemask_ps(_mm256_castsi256_ps(reinterpret_cast<__m256i>(mask.v)));
  return std::popcount(static_cast<unsigned>(signs));
#endif
}

/// How many lanes are infinite or NaN.
[[nodiscard]] SHARDOPT_TARGET_AVX2 inline __attribute__((always_inline)) int count_non_finite(
    Pack pack) noexcept {
  return count_lanes(math::logical_not(math::is_finite(pack)));
}

}  // namespace shardopt::inline v0

#endif  // SHARDOPT_HOST_AVX2
