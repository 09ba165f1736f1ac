// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/convert.hpp>
#include <shardopt/core/digest.hpp>
#include <shardopt/core/rank_tree.hpp>
#include <shardopt/core/tile.hpp>
#include <shardopt/devices/cuda_launch.cuh>

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace shardopt::inline v0::detail {

/// Runs a functor by one thread.
template <class Functor>
__global__ void invoke_kernel(Functor functor) {
  functor();
}

/// staging[state index] = element, a block a tile.
template <class T>
__global__ void __launch_bounds__(block_threads) pack_kernel(const Tile* tiles, TileField field, T* staging) {
  const Tile tile = tiles[blockIdx.x];
  const T* from = static_cast<const T*>(tile.address(field));
  for (std::uint32_t at = threadIdx.x; at < tile.count; at += block_threads)
    staging[tile.state + at] = from[at];
}

/// The way back.
template <class T>
__global__ void __launch_bounds__(block_threads)
    unpack_kernel(const Tile* tiles, TileField field, const T* staging) {
  const Tile tile = tiles[blockIdx.x];
  T* to = static_cast<T*>(tile.address(field));
  for (std::uint32_t at = threadIdx.x; at < tile.count; at += block_threads)
    to[at] = staging[tile.state + at];
}

/// master[state index] = parameter, a block a tile.
template <class Param>
__global__ void __launch_bounds__(block_threads) initialize_masters_kernel(const Tile* tiles, float* master) {
  const Tile tile = tiles[blockIdx.x];
  const Param* parameter = static_cast<const Param*>(tile.parameter);
  for (std::uint32_t at = threadIdx.x; at < tile.count; at += block_threads) {
    master[tile.state + at] = to_float(parameter[at]);
  }
}

/// parameter = master[state index] rounded, a block a tile.
template <class Param>
__global__ void __launch_bounds__(block_threads)
    round_masters_kernel(const Tile* tiles, const float* master) {
  const Tile tile = tiles[blockIdx.x];
  Param* parameter = static_cast<Param*>(tile.parameter);
  for (std::uint32_t at = threadIdx.x; at < tile.count; at += block_threads) {
    parameter[at] = from_float<Param>(master[tile.state + at]);
  }
}

/// *sum += digest of the elements, in any order.
template <class Bits>
__global__ void __launch_bounds__(block_threads)
    add_digest_kernel(const Bits* elements, std::int64_t count, std::uint64_t first,
                      unsigned long long* sum) {
  unsigned long long mine = 0;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * block_threads;
  for (std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * block_threads + threadIdx.x; at < count;
       at += step) {
    mine += element_digest(first + static_cast<std::uint64_t>(at), elements[at]);
  }
  for (int apart = 16; apart > 0; apart /= 2) mine += __shfl_xor_sync(0xffffffffU, mine, apart);
  if (threadIdx.x % 32 == 0) atomicAdd(sum, mine);
}

/// Where a rank's contribution to one element is: the own block in place, the others' received one after
/// another.
template <class T>
struct LoadReceived {
  const T* own;
  const T* received;
  std::int64_t count;
  std::int64_t at;
  int rank;

  SHARDOPT_HD float operator()(int source) const {
    if (source == rank) return to_float(own[at]);
    return to_float(received[(source < rank ? source : source - 1) * count + at]);
  }
};

/// own[i] = sum over ranks by the fixed tree, in fp32, rounded once. @pre world < 2^device_rank_levels
template <class T>
__global__ void __launch_bounds__(block_threads)
    sum_ranks_kernel(T* own, const T* received, std::int64_t count, int rank, int world) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * block_threads;
  for (std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * block_threads + threadIdx.x; at < count;
       at += step) {
    own[at] = from_float<T>(
        sum_over_ranks<device_rank_levels, float>(world, LoadReceived<T>{own, received, count, at, rank}));
  }
}

/// Ranks whose addresses fit in a kernel's arguments.
inline constexpr int most_sources = 64;

/// One buffer a rank, all readable from one device.
struct Sources {
  const void* addresses[most_sources];
};

/// Where a rank's contribution to one element is: in its own buffer.
template <class T>
struct LoadSource {
  const Sources& sources;
  std::int64_t at;

  SHARDOPT_HD float operator()(int source) const {
    return to_float(static_cast<const T*>(sources.addresses[source])[at]);
  }
};

/// to[i] = sum over ranks by the fixed tree, in fp32, rounded once; `to` may be one of the sources.
template <class T>
__global__ void __launch_bounds__(block_threads)
    sum_sources_kernel(const __grid_constant__ Sources sources, int world, T* to, std::int64_t count) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * block_threads;
  for (std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * block_threads + threadIdx.x; at < count;
       at += step) {
    to[at] = from_float<T>(sum_over_ranks<7, float>(world, LoadSource<T>{sources, at}));
  }
}

/// to[i] = sum over ranks of integers, modulo 2^64.
template <class Word>
__global__ void __launch_bounds__(block_threads)
    sum_words_kernel(const __grid_constant__ Sources sources, int world, Word* to, std::int64_t count) {
  const std::int64_t at = threadIdx.x;
  if (at >= count) return;
  Word sum = 0;
  for (int source = 0; source < world; ++source)
    sum += static_cast<const Word*>(sources.addresses[source])[at];
  to[at] = sum;
}

}  // namespace shardopt::inline v0::detail
