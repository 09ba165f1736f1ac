// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/collective.hpp>
#include <shardopt/core/parameter_table.hpp>
#include <shardopt/zero/bucket_buffers.hpp>
#include <shardopt/zero/handshake.hpp>
#include <shardopt/zero/host_wait.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>

namespace shardopt::inline v0::detail {

/// Digest of parameters' bits on this rank; waits. @param sum  device memory
template <Collective Comm, class Param, class Grad>
[[nodiscard]] std::uint64_t digest_of_parameters(const ParameterTable& table,
                                                 const EngineBuffers<Param, Grad>& buffers, Range entries,
                                                 std::uint64_t* sum, const Comm& comm) {
  using Bits = std::conditional_t<sizeof(Param) == 4, std::uint32_t, std::uint16_t>;
  const auto& device = comm.device();
  const auto stream = comm.stream();
  device.fill_zero(sum, sizeof(std::uint64_t), stream);
  std::uint64_t first = 0;
  for (std::uint32_t k = 0; k < table.size(); ++k) {
    const auto& entry = table.entries()[k];
    if (entry.alias_of) continue;
    if (entries.contains(k) && entry.numel > 0) {
      device.add_digest(reinterpret_cast<const Bits*>(buffers.parameter(k)), entry.numel, first, sum, stream);
    }
    first += static_cast<std::uint64_t>(entry.numel);
  }
  std::uint64_t result = 0;
  wait_for(comm, stream);  // behind what others may have to take part in: gives up with the collective
  device.download(&result, sum, sizeof result, stream);
  return result;
}

/// Collective; waits. The first parameter that is not the same bits on all ranks, frozen ones included, or
/// nothing.
template <Collective Comm, class Param, class Grad>
[[nodiscard]] std::optional<std::string> differing_parameter(Comm& comm, const ParameterTable& table,
                                                             const EngineBuffers<Param, Grad>& buffers,
                                                             void* scratch) {
  const auto differ = [&](Range entries) {
    const std::uint64_t mine =
        digest_of_parameters(table, buffers, entries, static_cast<std::uint64_t*>(scratch), comm);
    return !all_equal(exchange_all(comm, mine, scratch));
  };
  const auto count = static_cast<std::int64_t>(table.size());
  if (!differ({0, count})) return std::nullopt;
  for (std::int64_t k = 0; k < count; ++k) {
    if (differ({k, k + 1})) return table.entries()[static_cast<std::size_t>(k)].name;
  }
  return std::nullopt;
}

/// @throws CollectiveError naming the parameter, if one differs
inline void require_equal(const std::optional<std::string>& differing) {
  if (!differing) return;
  throw CollectiveError("shardopt: ranks hold different values of parameter " + in_quotes(*differing) +
                        "; start with equal ones, or set config.initial_parameters to broadcast");
}

/// Collective: every rank's parameters, frozen ones too, become rank 0's.
template <Collective Comm, class Param, class Grad>
void broadcast_parameters(Comm& comm, const ParameterTable& table,
                          const EngineBuffers<Param, Grad>& buffers) {
  for (std::uint32_t k = 0; k < table.size(); ++k) {
    const auto& entry = table.entries()[k];
    if (entry.alias_of || entry.numel == 0) continue;
    comm.broadcast(buffers.parameter(k), entry.numel * static_cast<std::int64_t>(sizeof(Param)), 0);
  }
}

}  // namespace shardopt::inline v0::detail
