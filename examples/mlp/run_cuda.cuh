// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda_resources.cuh"
#include "dispatch.hpp"
#include "network_cuda.cuh"
#include "rank.hpp"
#include "run.hpp"
#include "team.hpp"

#include <shardopt/cuda.cuh>

#include <thread>
#include <vector>

namespace mlp {

/// One rank: its device, its network, its streams.
template <class Precision, class Rule, class Sharding>
Result run_gpu(const Run& run, const Rule& rule, const Sharding& sharding, ncclComm_t comm, Team& team,
               int rank) {
  check(cudaSetDevice(rank), "cudaSetDevice");
  const Stream traffic;
  CudaNetwork<typename Precision::Param, typename Precision::Grad> network(run.layout, run.digits,
                                                                           run.largest_block());
  return run_rank<Precision>(run, rule, sharding, network, shardopt::Nccl::borrow(comm, traffic.get()), team);
}

/// Trains with one GPU and one host thread a rank, in one precision. Instantiated in one file a precision, to
/// compile side by side.
template <class Precision>
Result run_cuda_in(const Run& run) {
  Team team(run.options.ranks, run.digits.train.labels.size());
  Communicators comms(run.options.ranks);
  team.on_failure = [&] { comms.abort(); };
  Result result;
  with_sharding(run.options, [&](const auto& sharding) {
    with_rule(run.options, [&](const auto& rule) {
      std::vector<std::thread> threads;
      for (int rank = 0; rank < run.options.ranks; ++rank) {
        threads.emplace_back([&, rank, comm = comms[rank]] {
          team.run([&] {
            const Result mine = run_gpu<Precision>(run, rule, sharding, comm, team, rank);
            if (rank == 0) result = mine;
          });
        });
      }
      for (std::thread& thread : threads) thread.join();
    });
  });
  team.rethrow_failure();
  return result;
}

extern template Result run_cuda_in<Fp32>(const Run&);
extern template Result run_cuda_in<Bf16>(const Run&);
extern template Result run_cuda_in<Bf16Fp32Grads>(const Run&);

}  // namespace mlp
