// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/agreement.hpp>
#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/checkpoint/checkpointable.hpp>
#include <shardopt/checkpoint/equal_on_ranks.hpp>
#include <shardopt/checkpoint/file_system.hpp>
#include <shardopt/checkpoint/generations.hpp>
#include <shardopt/checkpoint/load_options.hpp>
#include <shardopt/checkpoint/loading.hpp>
#include <shardopt/checkpoint/manifest.hpp>
#include <shardopt/checkpoint/verify.hpp>
#include <shardopt/core/error.hpp>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace shardopt::inline v0::checkpoint {

namespace detail {

/// What ranks must agree on before anything is read.
[[nodiscard]] inline std::vector<Fact> facts_of(const LoadOptions& options) {
  const auto text = [](bool value) { return std::string(value ? "true" : "false"); };
  return {{"weights_only", text(options.weights_only)},
          {"keep_hyper_parameters", text(options.keep_hyper_parameters)},
          {"lenient", text(options.lenient)},
          {"coordinates", options.coordinates ? text_of(*options.coordinates) : "any"}};
}

/// Collective: throws the error again, with the newest generation that is whole, if that is another one than
/// `chosen` of `directory`. Where `chosen` is whole itself the error is no damage, and there is none to
/// offer.
template <class Optimizer>
[[noreturn]] void throw_with_alternative(Optimizer& optimizer, const CheckpointError& error,
                                         const std::filesystem::path& directory,
                                         const std::filesystem::path& chosen, const FileSystem& files) {
  std::string whole;
  if (optimizer.rank() == 0 && chosen != directory) {
    static_cast<void>(failure_of([&] {
      const auto found = newest_whole(directory, files);
      if (found && found->path != chosen) whole = found->path.string();
    }));
  }
  whole = optimizer.exchange(whole)[0];
  if (whole.empty()) throw CheckpointError(error);
  throw CheckpointError(std::string(error.what()) + "; " + in_quotes(whole) + " is whole: load that", whole);
}

}  // namespace detail

/// Loads a checkpoint into an optimizer between two steps: states and masters of what this rank keeps,
/// counters, hyper-parameters; then all ranks' parameters, made from the masters and gathered.
///
/// The world size, sharding policy, bucket size, parameter type and order of the table may be others than
/// when it was saved: states follow the names. Each rank reads the blocks that hold what it keeps and
/// verifies those; blocks that nobody keeps are verified in shares. All is checked before anything changes.
///
/// Collective; waits. Takes host memory of the size of the states that this rank keeps, for its time.
/// @param path  a generation's folder, a merged file, or a folder of generations: then the newest. Rank 0's
/// counts
/// @param stream  the last step was made on
/// @pre no other stream still reads the parameters
/// @throws std::invalid_argument on every rank for options that are not legal, on whichever
/// @throws std::logic_error on every rank in the middle of a step
/// @throws CheckpointError on every rank: listing what differs between the two, what failed on which rank, or
/// which option is not the same on all; nothing was changed. Where `path` is a folder of generations and the
/// newest is damaged, also naming the newest that is whole (CheckpointError::alternative); to find it rank 0
/// reads generations from the newest on, while the others wait
/// @throws Error what the device or the collective throws when a call of theirs fails after all was checked
/// (CudaError, NcclError, CollectiveError): that breaks the optimizer, whose states, counters and parameters
/// may then be the checkpoint's in part
template <Checkpointable Optimizer>
LoadReport load(Optimizer& optimizer, const std::filesystem::path& path, const LoadOptions& options,
                typename Optimizer::Stream stream) {
  const std::string what = "a checkpoint was not loaded";
  detail::collectively_check(optimizer, what, [&] {
    optimizer.require_between_steps("checkpoint::load");
    options.validate();
  });
  detail::require_equal_on_ranks(optimizer, what, detail::facts_of(options));
  const std::filesystem::path chosen =
      detail::from_rank_0(optimizer, what, [&] { return newest(path, *options.files).string(); });
  detail::Loading<Optimizer> loading(optimizer, options, stream);
  try {
    detail::collectively(optimizer, what, [&] { loading.open(chosen); });
  } catch (const CheckpointError& error) {
    detail::throw_with_alternative(optimizer, error, path, chosen, *options.files);
  }
  detail::collectively(optimizer, what, [&] { loading.compare(); });
  try {
    detail::collectively(optimizer, what, [&] { loading.read(); });
  } catch (const CheckpointError& error) {
    detail::throw_with_alternative(optimizer, error, path, chosen, *options.files);
  }
  loading.apply();
  return std::move(loading).report();
}

}  // namespace shardopt::inline v0::checkpoint
