// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/error.hpp>

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>

namespace shardopt::inline v0 {

/// Which process of how many this is, where one process drives one GPU.
struct ProcessPlace {
  int rank = 0;              ///< of this process: 0 .. world - 1
  int world = 1;             ///< number of processes
  int local_rank = 0;        ///< among the processes of this machine: picks the GPU
  std::string address = {};  ///< of rank 0's machine, empty if the environment does not tell
  int port = 29500;          ///< at which rank 0 hands out the communicator's id

  /// Reads what launchers set, the first that is there: RANK and WORLD_SIZE (with LOCAL_RANK, MASTER_ADDR,
  /// MASTER_PORT: torchrun and many scripts), OMPI_COMM_WORLD_* (Open MPI), SLURM_* (srun). Nothing if none
  /// of them is.
  /// @throws std::invalid_argument naming a variable that is missing, no number, or out of range
  [[nodiscard]] static std::optional<ProcessPlace> from_environment();
};

namespace detail {

/// One launcher's names.
struct LauncherNames {
  const char* rank;
  const char* world;
  const char* local_rank;
};

[[nodiscard]] inline std::optional<std::string> environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? std::optional<std::string>(value) : std::nullopt;
}

/// @throws std::invalid_argument naming the variable
[[nodiscard]] inline int number_in(const char* name, const std::string& text, int lowest, int highest) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < lowest || value > highest) {
    throw std::invalid_argument(std::string("shardopt: the environment's ") + name +
                                " must be a number from " + std::to_string(lowest) + " to " +
                                std::to_string(highest) + ", not " + in_quotes(text));
  }
  return value;
}

/// The first host of SLURM's list, such as "node[03-07,9],login": "node03".
[[nodiscard]] inline std::string first_host(std::string_view list) {
  const std::size_t end = list.find_first_of("[,");
  std::string host(list.substr(0, end));
  if (end == std::string_view::npos || list[end] == ',') return host;
  const std::size_t close = list.find_first_of("-,]", end);
  host += list.substr(end + 1, close - end - 1);
  const std::size_t bracket = list.find(']', end);
  if (bracket == std::string_view::npos) return host;
  return host += list.substr(bracket + 1, list.find(',', bracket) - bracket - 1);
}

[[nodiscard]] inline std::optional<ProcessPlace> place_of(const LauncherNames& names) {
  constexpr int most = 1 << 20;
  const auto rank = environment(names.rank);
  if (!rank) return std::nullopt;
  const auto world = environment(names.world);
  if (!world) {
    throw std::invalid_argument(std::string("shardopt: the environment has ") + names.rank + " but no " +
                                names.world);
  }
  ProcessPlace place;
  place.world = number_in(names.world, *world, 1, most);
  place.rank = number_in(names.rank, *rank, 0, place.world - 1);
  place.local_rank = place.rank;
  if (const auto local = environment(names.local_rank))
    place.local_rank = number_in(names.local_rank, *local, 0, place.rank);
  return place;
}

}  // namespace detail

inline std::optional<ProcessPlace> ProcessPlace::from_environment() {
  constexpr detail::LauncherNames launchers[] = {
      {"RANK", "WORLD_SIZE", "LOCAL_RANK"},
      {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
      {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"},
  };
  for (const detail::LauncherNames& names : launchers) {
    std::optional<ProcessPlace> place = detail::place_of(names);
    if (!place) continue;
    if (const auto port = detail::environment("MASTER_PORT")) {
      place->port = detail::number_in("MASTER_PORT", *port, 1, 65535);
      // torchrun's agent listens at that port itself.
      if (detail::environment("TORCHELASTIC_USE_AGENT_STORE") == "True")
        place->port = place->port % 65535 + 1;
    } else if (const auto job = detail::environment("SLURM_JOB_ID")) {
      // Jobs that share a machine need ports of their own.
      place->port = 20000 + detail::number_in("SLURM_JOB_ID", *job, 0, (1 << 30)) % 20000;
    }
    if (const auto address = detail::environment("MASTER_ADDR")) {
      place->address = *address;
    } else if (const auto nodes = detail::environment("SLURM_STEP_NODELIST")) {
      place->address = detail::first_host(*nodes);
    }
    return place;
  }
  return std::nullopt;
}

}  // namespace shardopt::inline v0
