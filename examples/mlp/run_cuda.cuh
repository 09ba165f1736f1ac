// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda_resources.cuh"
#include "dispatch.hpp"
#include "failure.hpp"
#include "network_cuda.cuh"
#include "rank.hpp"
#include "run.hpp"
#include "team.hpp"

#include <shardopt/cuda.cuh>

#include <nccl.h>

#include <cstdlib>
#include <exception>
#include <thread>
#include <vector>

namespace mlp {

/// One rank: its device, its network, its streams.
template <class Precision, class Rule, class Sharding>
Result run_gpu(const Run& run, const Rule& rule, const Sharding& sharding, const ncclUniqueId& id, Team& team,
               int rank) {
  check(cudaSetDevice(rank), "cudaSetDevice");
  const Stream traffic;
  CudaNetwork<typename Precision::Param, typename Precision::Grad> network(run.layout, run.digits,
                                                                           run.largest_block());
  return run_rank<Precision>(run, rule, sharding, network,
                             shardopt::Nccl::create(id, rank, run.options.ranks, traffic.get()), team);
}

/// Trains with one GPU and one host thread a rank, in one precision. Instantiated in one file a precision, to
/// compile side by side.
template <class Precision>
Result run_cuda_in(const Run& run) {
  Team team(run.options.ranks, run.digits.train.labels.size());
  // The others may wait inside NCCL for a rank that fails, and a communicator cannot be taken from a thread
  // that is using it: the process ends.
  team.on_failure = [](const std::exception_ptr& failure) { std::_Exit(report(failure)); };
  ncclUniqueId id;
  check(ncclGetUniqueId(&id), "ncclGetUniqueId");
  Result result;
  with_sharding(run.options, [&](const auto& sharding) {
    with_rule(run.options, [&](const auto& rule) {
      check_settings<Precision, shardopt::Nccl>(run, rule, sharding);
      std::vector<std::thread> threads;
      for (int rank = 0; rank < run.options.ranks; ++rank) {
        threads.emplace_back([&, rank] {
          team.run([&] {
            const Result mine = run_gpu<Precision>(run, rule, sharding, id, team, rank);
            if (rank == 0) result = mine;
          });
        });
      }
      for (std::thread& thread : threads) thread.join();
    });
  });
  return result;
}

extern template Result run_cuda_in<Fp32>(const Run&);
extern template Result run_cuda_in<Bf16>(const Run&);
extern template Result run_cuda_in<Bf16Fp32Grads>(const Run&);

}  // namespace mlp
