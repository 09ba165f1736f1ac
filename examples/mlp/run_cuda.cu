// SPDX-License-Identifier: Apache-2.0
#include "run.hpp"

#include "cuda_resources.cuh"
#include "network_cuda.cuh"

#include <shardopt/cuda.cuh>

#include <thread>
#include <utility>
#include <vector>

namespace mlp {
namespace {

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

}  // namespace

int gpus() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();  // "no device" is an answer
  return 0;
}

bool built_with_cuda() { return true; }

Result run_cuda(const Run& run) {
  Team team(run.options.ranks, run.digits.train.labels.size());
  Communicators comms(run.options.ranks);
  team.on_failure = [&] { comms.abort(); };
  std::vector<Result> results(static_cast<std::size_t>(run.options.ranks));
  const auto launch = [&]<class Precision>(Type<Precision>, const auto& rule, const auto& sharding) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < run.options.ranks; ++rank) {
      threads.emplace_back([&, rank, comm = comms[rank]] {
        team.run([&] {
          results[static_cast<std::size_t>(rank)] = run_gpu<Precision>(run, rule, sharding, comm, team, rank);
        });
      });
    }
    for (std::thread& thread : threads) thread.join();
  };
  with_precision(run.options.precision, [&](auto precision) {
    with_sharding(run.options, [&](const auto& sharding) {
      with_rule(run.options, [&](const auto& rule) { launch(precision, rule, sharding); });
    });
  });
  team.rethrow_failure();
  return results[0];
}

}  // namespace mlp
