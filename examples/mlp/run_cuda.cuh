// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda_resources.cuh"
#include "dispatch.hpp"
#include "failure.hpp"
#include "network_cuda.cuh"
#include "print_in_order.cuh"
#include "rank.hpp"
#include "run.hpp"
#include "team.hpp"

#include <shardopt/collectives/bootstrap.hpp>
#include <shardopt/cuda.cuh>

#include <nccl.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace mlp {

/// How a rank looks after its communicator.
inline shardopt::NcclOptions nccl_options(const Run& run) {
  const double seconds = run.options.deadline.value_or(run.place ? 600.0 : 0.0);
  return {.deadline = std::chrono::milliseconds(static_cast<long long>(std::ceil(1000 * seconds)))};
}

/// One rank: its network, its streams, on the current device.
/// @param print  shows, in its turn, what a rank has to say: print(communicator, stream, text)
template <class Precision, class Rule, class Sharding, class Print>
Result run_gpu(const Run& run, const Rule& rule, const Sharding& sharding, const ncclUniqueId& id, int rank,
               const Print& print) {
  const Stream traffic;
  CudaNetwork<typename Precision::Param, typename Precision::Grad> network(run.layout, run.digits,
                                                                           run.largest_block());
  auto nccl = shardopt::Nccl::create(id, rank, run.options.ranks, traffic.get(), nccl_options(run));
  const ncclComm_t comm = nccl.native();
  return run_rank<Precision>(run, rule, sharding, network, std::move(nccl),
                             [&](const std::string& text) { print(comm, traffic.get(), text); });
}

/// Ranks are threads of this process.
template <class Precision, class Rule, class Sharding>
Result run_threads(const Run& run, const Rule& rule, const Sharding& sharding) {
  Team team(run.options.ranks);
  // The others may wait inside NCCL for a rank that fails, and a communicator cannot be taken from a thread
  // that is using it: the process ends.
  team.on_failure = [](const std::exception_ptr& failure) { std::_Exit(report(failure)); };
  ncclUniqueId id;
  check(ncclGetUniqueId(&id), "ncclGetUniqueId");
  Result result;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < run.options.ranks; ++rank) {
    threads.emplace_back([&, rank] {
      team.run([&] {
        shardopt::Cuda::select(rank);
        const Result mine = run_gpu<Precision>(
            run, rule, sharding, id, rank,
            [&](ncclComm_t, cudaStream_t, const std::string& text) { team.print_in_order(rank, text); });
        if (rank == 0) result = mine;
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
  return result;
}

/// This process is one rank.
template <class Precision, class Rule, class Sharding>
Result run_process(const Run& run, const Rule& rule, const Sharding& sharding) {
  const shardopt::ProcessPlace& place = *run.place;
  // A launcher may let each process see its own GPU alone.
  shardopt::Cuda::select(gpus() == 1 ? 0 : place.local_rank);
  ncclUniqueId id{};
  if (place.rank == 0) check(ncclGetUniqueId(&id), "ncclGetUniqueId");
  const std::chrono::milliseconds deadline = nccl_options(run).deadline;
  shardopt::share_from_rank_0(place, id, deadline.count() > 0 ? deadline : std::chrono::minutes(10));
  return run_gpu<Precision>(run, rule, sharding, id, place.rank,
                            [&](ncclComm_t comm, cudaStream_t stream, const std::string& text) {
                              print_in_order(comm, stream, nccl_options(run), text);
                            });
}

/// Trains in one precision. Instantiated in one file a precision, to compile side by side.
template <class Precision>
Result run_cuda_in(const Run& run) {
  Result result;
  with_sharding(run.options, [&](const auto& sharding) {
    with_rule(run.options, [&](const auto& rule) {
      result = run.place ? run_process<Precision>(run, rule, sharding)
                         : run_threads<Precision>(run, rule, sharding);
    });
  });
  return result;
}

/// Lets the library check what was asked for, in one precision.
template <class Precision>
void check_cuda_in(const Run& run) {
  with_sharding(run.options, [&](const auto& sharding) {
    with_rule(run.options,
              [&](const auto& rule) { check_settings<Precision, shardopt::Nccl>(run, rule, sharding); });
  });
}

extern template Result run_cuda_in<Fp32>(const Run&);
extern template Result run_cuda_in<Bf16>(const Run&);
extern template Result run_cuda_in<Bf16Fp32Grads>(const Run&);
extern template void check_cuda_in<Fp32>(const Run&);
extern template void check_cuda_in<Bf16>(const Run&);
extern template void check_cuda_in<Bf16Fp32Grads>(const Run&);

}  // namespace mlp
