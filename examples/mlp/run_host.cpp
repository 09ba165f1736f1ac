// SPDX-License-Identifier: Apache-2.0
#include "run.hpp"

#include "network_host.hpp"

#include <shardopt/shardopt.hpp>

#include <cblas.h>

#include <utility>

namespace mlp {

Result run_host(const Run& run) {
  openblas_set_num_threads(1);  // a rank is one thread; products must not depend on how many there are
  Team team(run.options.ranks, run.digits.train.labels.size());
  Result result;
  const auto launch = [&]<class Precision>(Type<Precision>, const auto& rule, const auto& sharding) {
    using Comm = shardopt::Threads<shardopt::Host>;
    Comm::run(run.options.ranks, [&](Comm comm) {
      const bool done = team.run([&] {
        HostNetwork<typename Precision::Param, typename Precision::Grad> network(run.layout, run.digits,
                                                                                 run.largest_block());
        const int rank = comm.rank();
        const Result mine = run_rank<Precision>(run, rule, sharding, network, std::move(comm), team);
        if (rank == 0) result = mine;
      });
      if (!done) team.rethrow_failure();  // the others must not wait for this rank
    });
  };
  with_precision(run.options.precision, [&](auto precision) {
    with_sharding(run.options, [&](const auto& sharding) {
      with_rule(run.options, [&](const auto& rule) { launch(precision, rule, sharding); });
    });
  });
  return result;
}

}  // namespace mlp
