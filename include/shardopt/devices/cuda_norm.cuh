// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/convert.hpp>
#include <shardopt/core/exact_sum.hpp>
#include <shardopt/core/math.hpp>
#include <shardopt/core/tile.hpp>
#include <shardopt/devices/cuda_launch.cuh>

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace shardopt::inline v0::detail {

/// One grain in the registers of a warp: each thread holds one partial sum's elements, in ascending order.
template <class Grad>
class WarpGrain {
  static constexpr int rows = static_cast<int>(grain_elements) / 32;
  static constexpr unsigned all_threads = 0xffffffffU;

 public:
  /// Element 32·row + thread, 0 beyond `count`. Whole grains of 16-bit types come in words of two elements:
  /// then the even partial sums lie in the lower 16 threads, the odd ones in the upper. Called by all threads
  /// of a warp.
  __device__ __forceinline__ void load(const Grad* gradient, std::uint32_t count) {
    const std::uint32_t lane = threadIdx.x % 32;
    paired_ = false;
    if constexpr (sizeof(Grad) == 2) {
      paired_ = count == grain_elements && reinterpret_cast<std::uintptr_t>(gradient) % 4 == 0;
      if (paired_) return load_pairs(reinterpret_cast<const std::uint32_t*>(gradient), lane);
    }
    SHARDOPT_UNROLL
    for (int row = 0; row < rows; ++row) {
      const std::uint32_t at = 32 * static_cast<std::uint32_t>(row) + lane;
      values_[row] = at < count ? to_float(gradient[at]) : 0.0f;
    }
  }

  /// Sum of squares in the host's order, the same in all threads; non-finite elements are left out and
  /// counted.
  [[nodiscard]] __device__ __forceinline__ double squares(unsigned& non_finite) const {
    // A float's square is exact in a double: fused, each sum is rounded as by a product and an addition.
    double sum = 0.0;
    SHARDOPT_UNROLL
    for (int row = 0; row < rows; ++row) {
      const double wide = math::widen(values_[row]);
      sum = math::fma(wide, wide, sum);
    }
    if (!math::is_finite(sum)) sum = finite_squares(non_finite);  // finite floats cannot overflow it
    // Partial sums 16 apart, 8, 4, 2, 1; partial sum s lies in thread s, or in thread s/2 + 16·(s mod 2).
    SHARDOPT_UNROLL
    for (int apart = 16; apart > 1; apart /= 2)
      sum = math::add(sum, from_partner(sum, paired_ ? apart / 2 : apart));
    return math::add(sum, from_partner(sum, paired_ ? 16 : 1));
  }

 private:
  [[nodiscard]] __device__ __forceinline__ double finite_squares(unsigned& non_finite) const {
    double sum = 0.0;
    SHARDOPT_UNROLL
    for (const float value : values_) {
      const bool finite = math::is_finite(value);
      non_finite += finite ? 0U : 1U;
      const double wide = finite ? math::widen(value) : 0.0;
      sum = math::fma(wide, wide, sum);
    }
    return sum;
  }

  [[nodiscard]] static __device__ __forceinline__ double from_partner(double sum, int distance) {
    return __shfl_xor_sync(all_threads, sum, distance);
  }

  /// The lower or the upper half of a word.
  [[nodiscard]] static __device__ __forceinline__ float half_of(std::uint32_t word, bool upper) {
    const auto bits = static_cast<std::uint16_t>(upper ? word >> 16 : word & 0xffffU);
    Grad element;
    memcpy(&element, &bits, sizeof bits);
    return to_float(element);
  }

  /// Thread t reads elements 2t and 2t+1 of each 64; the threads 16 apart, which have the even and the odd
  /// row of the same two partial sums, exchange what the other sums.
  __device__ __forceinline__ void load_pairs(const std::uint32_t* words, std::uint32_t lane) {
    const bool odd = lane >= 16;  // reads odd rows, keeps the odd partial sum
    std::uint32_t own[rows / 2];
    SHARDOPT_UNROLL
    for (int k = 0; k < rows / 2; ++k) own[k] = words[32 * static_cast<std::uint32_t>(k) + lane];
    SHARDOPT_UNROLL
    for (int k = 0; k < rows / 2; k += 2) {
      const std::uint32_t lower = __byte_perm(own[k], own[k + 1], 0x5410U);
      const std::uint32_t upper = __byte_perm(own[k], own[k + 1], 0x7632U);
      const std::uint32_t kept = odd ? upper : lower;
      const std::uint32_t received = __shfl_xor_sync(all_threads, odd ? lower : upper, 16);
      const std::uint32_t even_rows = odd ? received : kept;
      const std::uint32_t odd_rows = odd ? kept : received;
      values_[2 * k] = half_of(even_rows, false);
      values_[2 * k + 1] = half_of(odd_rows, false);
      values_[2 * k + 2] = half_of(even_rows, true);
      values_[2 * k + 3] = half_of(odd_rows, true);
    }
  }

  float values_[rows] = {};
  bool paired_ = false;
};

/// Where a warp finds its grain of a tile. A tile has at most as many grains as a block has warps.
struct GrainOfWarp {
  const void* gradient;
  std::uint32_t count;  ///< 0: this warp has none

  template <class Grad>
  [[nodiscard]] static __device__ __forceinline__ GrainOfWarp of(const Tile& tile) {
    const std::uint32_t warp = threadIdx.x / 32;
    const std::uint32_t first = tile.first_grain();
    const std::uint32_t begin =
        warp == 0 ? 0 : first + (warp - 1) * static_cast<std::uint32_t>(grain_elements);
    if (begin >= tile.count) return {nullptr, 0};
    const std::uint32_t left = warp == 0 ? first : tile.count - begin;
    return {static_cast<const Grad*>(tile.gradient) + begin,
            left < grain_elements ? left : static_cast<std::uint32_t>(grain_elements)};
  }
};

/// Adds squares to an exact sum: a warp a grain, the next grain on its way while one is added up; limbs are
/// collected in shared memory, one atomic a limb and block at the end.
template <class Grad>
__global__ void __launch_bounds__(block_threads)
    add_squares_kernel(const Tile* tiles, std::int64_t tile_count, unsigned long long* limbs,
                       unsigned long long* non_finite) {
  constexpr int words = exact_sum::Squares::limbs + 1;
  __shared__ unsigned long long collected[words];
  if (threadIdx.x < words) collected[threadIdx.x] = 0;
  __syncthreads();
  const std::uint32_t lane = threadIdx.x % 32;
  unsigned bad = 0;
  const auto grain_at = [&](std::int64_t k) {
    return k < tile_count ? GrainOfWarp::of<Grad>(tiles[k]) : GrainOfWarp{nullptr, 0};
  };
  WarpGrain<Grad> grain;
  GrainOfWarp next = grain_at(blockIdx.x);
  if (next.count > 0) grain.load(static_cast<const Grad*>(next.gradient), next.count);
  for (std::int64_t k = blockIdx.x; k < tile_count; k += gridDim.x) {
    const bool has_grain = next.count > 0;
    const WarpGrain<Grad> current = grain;
    next = grain_at(k + gridDim.x);
    if (next.count > 0) grain.load(static_cast<const Grad*>(next.gradient), next.count);
    if (!has_grain) continue;
    const double sum = current.squares(bad);
    const exact_sum::Addend addend = exact_sum::Squares::split(sum);
    if (lane < 3 && bits_of(sum) != 0) {
      const std::uint32_t part = lane == 0 ? addend.parts[0] : lane == 1 ? addend.parts[1] : addend.parts[2];
      atomicAdd(&collected[addend.first + static_cast<int>(lane)], static_cast<unsigned long long>(part));
    }
  }
  if (bad != 0) atomicAdd(&collected[exact_sum::Squares::limbs], static_cast<unsigned long long>(bad));
  __syncthreads();
  if (threadIdx.x >= words || collected[threadIdx.x] == 0) return;
  atomicAdd(threadIdx.x < exact_sum::Squares::limbs ? limbs + threadIdx.x : non_finite,
            collected[threadIdx.x]);
}

}  // namespace shardopt::inline v0::detail
