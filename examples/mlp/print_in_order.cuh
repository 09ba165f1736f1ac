// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda_resources.cuh"

#include <shardopt/cuda.cuh>

#include <cstddef>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

namespace mlp {

/// Where ranks are processes: brings together what each of them has to say (4 KiB at most); rank 0 prints it,
/// in order of ranks. Collective; waits.
/// @param stream  the one that the communicator is used on
inline void print_in_order(ncclComm_t comm, cudaStream_t stream, const shardopt::NcclOptions& options,
                           const std::string& text) {
  constexpr std::size_t most = 4096;
  shardopt::Nccl nccl = shardopt::Nccl::borrow(comm, stream, options);
  std::vector<char> mine(most, '\0');
  text.copy(mine.data(), most - 1);
  std::vector<char> all(most * static_cast<std::size_t>(nccl.world()));
  const DeviceArray<char> scratch(all.size());
  nccl.exchange(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)), scratch.data());
  if (nccl.rank() != 0) return;
  for (std::size_t at = 0; at < all.size(); at += most) std::fputs(&all[at], stdout);
  std::fflush(stdout);
}

}  // namespace mlp
