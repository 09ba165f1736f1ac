// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/error.hpp>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
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
template <class Number>
[[nodiscard]] Number number_in(const char* name, const std::string& text, Number lowest, Number highest) {
  Number value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < lowest || value > highest) {
    throw std::invalid_argument(std::string("shardopt: the environment's ") + name +
                                " must be a number from " + std::to_string(lowest) + " to " +
                                std::to_string(highest) + ", not " + in_quotes(text));
  }
  return value;
}

/// The first host of SLURM's list, such as "rack[0-1]node[03-07,9],login": "rack0node03".
[[nodiscard]] inline std::string first_host(std::string_view list) {
  std::string host;
  while (!list.empty() && list.front() != ',') {
    const std::size_t plain = (std::min)(list.find_first_of("[,"), list.size());
    host += list.substr(0, plain);
    list.remove_prefix(plain);
    if (list.empty() || list.front() == ',') break;
    host += list.substr(1, list.find_first_of("-,]") - 1);  // of a range, its first
    list.remove_prefix((std::min)(list.find(']'), list.size() - 1) + 1);
  }
  return host;
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
        place->port += place->port < 65535 ? 1 : -1;
    } else if (const auto job = detail::environment("SLURM_JOB_ID")) {
      // Jobs that share a machine need ports of their own.
      place->port =
          20000 + static_cast<int>(detail::number_in<std::uint64_t>(
                                       "SLURM_JOB_ID", *job, 0, (std::numeric_limits<std::uint64_t>::max)()) %
                                   20000);
    }
    if (const auto address = detail::environment("MASTER_ADDR")) {
      place->address = *address;
    } else if (const auto nodes = detail::environment("SLURM_STEP_NODELIST")) {
      place->address = detail::first_host(*nodes);
    }
    return place;
  }
  // A shell within an allocation of SLURM's has SLURM_NTASKS, too; but these are set for several processes.
  for (const char* world : {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"}) {
    const auto text = detail::environment(world);
    if (text && *text != "1")
      throw std::invalid_argument(std::string("shardopt: the environment has ") + world +
                                  ", but nothing that tells this process its rank, such as RANK");
  }
  return std::nullopt;
}

}  // namespace shardopt::inline v0
