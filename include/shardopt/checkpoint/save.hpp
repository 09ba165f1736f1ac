// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/agreement.hpp>
#include <shardopt/checkpoint/checkpointable.hpp>
#include <shardopt/checkpoint/commit.hpp>
#include <shardopt/checkpoint/describe.hpp>
#include <shardopt/checkpoint/device_reader.hpp>
#include <shardopt/checkpoint/equal_on_ranks.hpp>
#include <shardopt/checkpoint/save_options.hpp>
#include <shardopt/checkpoint/shard_file.hpp>
#include <shardopt/checkpoint/shard_writer.hpp>

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace shardopt::inline v0::checkpoint {

namespace detail {

/// One save, as one rank sees it: all that does not depend on the optimizer any more.
struct Save {
  FileSystem* files;
  SaveOptions options;
  Manifest manifest;                    ///< without files
  std::vector<Manifest::Piece> pieces;  ///< of this rank
  SavePlace place;
  std::int64_t rank = 0;

  /// "saving the checkpoint of iteration 20 in 'runs/a' failed (complete ones that were there stay)". It may
  /// have failed behind the rename that completes the new one, too.
  [[nodiscard]] std::string failed() const {
    return "saving the checkpoint of iteration " + std::to_string(manifest.iteration) + " in " +
           in_quotes(place.directory.string()) + " failed (complete ones that were there stay)";
  }

  [[nodiscard]] std::string file_name() const {
    return shard_name(manifest.coordinates, rank, manifest.world);
  }

  /// Writes this rank's file and its note. @param states  calls its argument with the bytes of all states
  template <class States>
  std::int64_t write(const States& states) const {
    ShardWriter writer(*files, place.saving / file_name(), shard_header(manifest, rank, pieces));
    states([&](std::span<const std::byte> bytes) { writer.append(bytes); });
    Manifest::File file = writer.finish(file_name());
    file.pieces = pieces;
    file.extra = options.rank_extra;
    write_part(*files, place, rank, file);
    return file.bytes;
  }

  /// Best effort, after a failure.
  void clear_away() const noexcept {
    if (rank != 0) return;
    static_cast<void>(failure_of([&] { files->remove(place.saving); }));
  }
};

/// What ranks must agree on before anything is written.
[[nodiscard]] inline std::vector<Fact> facts_of(const Manifest& manifest, const SaveOptions& options) {
  std::vector<Fact> facts = {{"iteration", std::to_string(manifest.iteration)},
                             {"updates", std::to_string(manifest.updates)},
                             {"keep", std::to_string(options.keep)},
                             {"files", shard_name(manifest.coordinates, 0, manifest.world)}};
  for (const auto& [name, extra] : options.extras) facts.emplace_back("extra " + in_quotes(name), extra);
  return facts;
}

/// Collective: what every rank must know before it writes. Nothing is written unless all ranks agree.
/// @throws as save() does
template <Checkpointable Optimizer>
[[nodiscard]] Save begin_save(Optimizer& optimizer, const std::filesystem::path& directory,
                              const SaveOptions& options, typename Optimizer::Stream stream) {
  Save save{.files = options.files, .options = options, .manifest = {}, .pieces = {}, .place = {}};
  save.rank = optimizer.rank();
  save.place.directory = directory;
  const std::string what = "a checkpoint in " + in_quotes(directory.string()) + " was not begun";
  collectively_check(optimizer, what, [&] {
    optimizer.require_between_steps("checkpoint::save");
    options.validate();
  });
  collectively(optimizer, what, [&] {
    save.manifest = describe(optimizer, stream);
    save.manifest.coordinates = options.coordinates;
    save.manifest.extras = options.extras;
    save.pieces = pieces_of(optimizer.owned_states(), optimizer.table(), "master");
    static_cast<void>(to_text(save.manifest));  // names and extras can be written
    static_cast<void>(text_of_json(Json(options.rank_extra), "a rank's extra text"));
  });
  require_equal_on_ranks(optimizer, save.failed(), facts_of(save.manifest, options));
  const std::string saving =
      from_rank_0(optimizer, save.failed(), [&] { return begin_generation(*save.files, directory); });
  save.place = place_of(directory, saving, save.manifest);
  return save;
}

}  // namespace detail

/// Saves this rank's share of an optimizer between two steps: parameters in fp32, states, counters,
/// hyper-parameters. Returns when the checkpoint is complete and on stable storage.
///
/// Every rank writes its own file into a new folder; when all have, one rename makes the generation complete.
/// Cut at any instant, the directory holds the complete generations it held before, or the new one too. The
/// directory must be on a file system that all ranks share.
///
/// Collective; waits. Takes 8 MiB of page-locked memory at the first save, beyond the MemoryPlan,
/// which the optimizer keeps.
/// @param stream  the last step was made on
/// @throws std::invalid_argument on every rank for options that are not legal, on whichever
/// @throws std::logic_error on every rank in the middle of a step
/// @throws CheckpointError on every rank, naming the ranks that failed: disk full, no permission, ranks that
/// disagree; complete generations stay as they were. If all that failed is bringing the new one's name to
/// stable storage, it is there, and the message says so
template <Checkpointable Optimizer>
SaveReport save(Optimizer& optimizer, const std::filesystem::path& directory, const SaveOptions& options,
                typename Optimizer::Stream stream) {
  const detail::Save save = detail::begin_save(optimizer, directory, options, stream);
  SaveReport report{.generation = save.place.complete, .iteration = save.manifest.iteration};
  try {
    detail::collectively(optimizer, save.failed(), [&] {
      report.bytes = save.write([&](const auto& sink) {
        detail::DeviceReader<typename Optimizer::Device> reader(optimizer.device(),
                                                                optimizer.transfer_memory());
        reader.read(optimizer.owned_states(), stream, sink);
      });
    });
    detail::collectively(optimizer, save.failed(), [&] {
      if (save.rank == 0) detail::commit(*save.files, save.place, save.manifest);
    });
  } catch (...) {
    save.clear_away();
    throw;
  }
  if (save.rank == 0) report.warnings = detail::prune(*save.files, directory, options.keep);
  return report;
}

}  // namespace shardopt::inline v0::checkpoint
