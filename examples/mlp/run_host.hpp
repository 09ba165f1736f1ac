// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "dispatch.hpp"
#include "network_host.hpp"
#include "rank.hpp"
#include "run.hpp"
#include "team.hpp"

#include <shardopt/shardopt.hpp>

#include <string>
#include <utility>

namespace mlp {

/// Trains with ranks that are threads, in one precision. Instantiated in one file a precision, to compile
/// side by side.
template <class Precision>
Result run_host_in(const Run& run) {
  using Comm = shardopt::Threads<shardopt::Host>;
  using Network = HostNetwork<typename Precision::Param, typename Precision::Grad>;
  Team team(run.options.ranks);
  Result result;
  with_sharding(run.options, [&](const auto& sharding) {
    with_rule(run.options, [&](const auto& rule) {
      check_settings<Precision, Comm>(run, rule, sharding);
      Comm::run(run.options.ranks, [&](Comm comm) {
        const bool done = team.run([&] {
          const int rank = comm.rank();
          Network network(run.layout, run.digits, run.largest_block());
          const Result mine =
              run_rank<Precision>(run, rule, sharding, network, std::move(comm),
                                  [&](const std::string& text) { team.print_in_order(rank, text); });
          if (rank == 0) result = mine;
        });
        if (!done) team.rethrow_failure();  // ends the others' traffic, too
      });
    });
  });
  return result;
}

extern template Result run_host_in<Fp32>(const Run&);
extern template Result run_host_in<Bf16>(const Run&);
extern template Result run_host_in<Bf16Fp32Grads>(const Run&);

}  // namespace mlp
