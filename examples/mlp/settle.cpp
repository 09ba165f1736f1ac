// SPDX-License-Identifier: Apache-2.0
#include "settle.hpp"

#include "launch.hpp"
#include "run.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <string>
#include <system_error>

namespace mlp {
namespace {

void settle_backend(Options& options, int gpus) {
  if (options.backend == Backend::automatic) options.backend = gpus > 0 ? Backend::cuda : Backend::host;
  if (options.backend == Backend::host) return;
  if (!built_with_cuda()) throw UsageError("--backend cuda: this program was built without CUDA");
  if (gpus == 0) throw UsageError("--backend cuda: no GPU answers");
}

/// Ranks are processes, whoever starts them.
void settle_processes(Options& options, int world, bool to_be_started) {
  const std::string processes = std::to_string(world) + (world == 1 ? " process" : " processes");
  if (options.ranks != 0 && options.ranks != world) {
    throw UsageError("--ranks " + std::to_string(options.ranks) +
                     ": each process is one rank, and there are " + processes);
  }
  if (options.backend == Backend::host)
    throw UsageError("--backend host: ranks are threads there, not " + processes);
  options.ranks = world;
  options.backend = Backend::cuda;
  const int gpus = to_be_started ? gpus_of_children() : mlp::gpus();
  settle_backend(options, gpus);
  if (to_be_started && world > gpus) {
    throw UsageError("--processes " + std::to_string(world) + ": there are only " + std::to_string(gpus) +
                     " GPUs, and each process needs one");
  }
}

void settle_threads(Options& options) {
  const int gpus = options.backend == Backend::host ? 0 : mlp::gpus();
  settle_backend(options, gpus);
  if (options.backend == Backend::cuda) {
    if (options.ranks > gpus) {
      throw UsageError("--ranks " + std::to_string(options.ranks) + ": there are only " +
                       std::to_string(gpus) + " GPUs, and each rank needs one");
    }
    if (options.ranks == 0) options.ranks = std::min(4, gpus);
  }
  if (options.ranks == 0) options.ranks = 4;
}

void settle_checkpoints(const Options& options) {
  if (options.checkpoint_dir.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(options.checkpoint_dir, error);
  if (!error && access(options.checkpoint_dir.c_str(), W_OK | X_OK) != 0)
    error.assign(errno, std::generic_category());
  if (error) {
    throw UsageError("--checkpoint-dir: cannot write into '" + options.checkpoint_dir +
                     "': " + error.message());
  }
}

}  // namespace

std::optional<shardopt::ProcessPlace> find_place(const Options& options) {
  auto place = shardopt::ProcessPlace::from_environment();
  if (place && place->world == 1) place.reset();  // says nothing: Slurm sets it in every job
  if (!place && options.processes == 1) place.emplace();
  if (place && options.processes != 0 && options.processes != place->world) {
    throw UsageError("--processes " + std::to_string(options.processes) + ": this is already one of " +
                     std::to_string(place->world) +
                     " processes, by the environment (RANK, OMPI_* or SLURM_*)");
  }
  return place;
}

void settle(Options& options, const Digits& digits, const std::optional<shardopt::ProcessPlace>& place) {
  if (place || options.processes > 0) {
    settle_processes(options, place ? place->world : options.processes, !place);
  } else {
    settle_threads(options);
  }
  const int samples = digits.train.count();
  if (options.batch > samples) {
    throw UsageError("--batch " + std::to_string(options.batch) + ": there are only " +
                     std::to_string(samples) + " training samples");
  }
  if (static_cast<long long>(options.ranks) * options.micro_batches > options.batch) {
    throw UsageError("--batch " + std::to_string(options.batch) + ": too few samples for " +
                     std::to_string(options.ranks) + " ranks with " + std::to_string(options.micro_batches) +
                     " micro-batches each");
  }
  settle_checkpoints(options);
}

}  // namespace mlp
