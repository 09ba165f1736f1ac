// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/agreement.hpp>
#include <shardopt/checkpoint/checkpoint.hpp>
#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/checkpoint/checksum.hpp>
#include <shardopt/checkpoint/commit.hpp>
#include <shardopt/checkpoint/extracts.hpp>
#include <shardopt/checkpoint/file_system.hpp>
#include <shardopt/checkpoint/manifest.hpp>
#include <shardopt/checkpoint/merge.hpp>
#include <shardopt/checkpoint/posix_files.hpp>
#include <shardopt/checkpoint/safetensors.hpp>
#include <shardopt/checkpoint/shard_again.hpp>
#include <shardopt/checkpoint/shard_file.hpp>
#include <shardopt/checkpoint/stream_states.hpp>
#include <shardopt/checkpoint/verify.hpp>
#include <shardopt/core/error.hpp>
#include <shardopt/core/version.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace shardopt::inline v0::checkpoint {

/// How a checkpoint is cut for another world.
struct ReshardOptions {
  /// The largest world: each rank takes a file, and tens of bytes of memory for each of its pieces.
  static constexpr std::int64_t max_world = 1'000'000;
  std::int64_t world = 1;  ///< ranks that will load it; 1 to max_world
  /// "flat", "per-parameter" or "replicated"; empty: as the source was.
  std::string sharding = {};
  /// As the sharding policy of the run that will load it: then each rank reads its own file only.
  std::int64_t bucket_bytes = std::int64_t{32} << 20;
  Progress progress = {};  ///< is told how many bytes of the files have been written and read again
  FileSystem* files = &PosixFiles::instance();  ///< to write to; not null
};

/// What was written.
struct ReshardReport {
  std::filesystem::path generation;     ///< its folder
  std::int64_t bytes = 0;               ///< of all its files
  std::vector<std::string> notes = {};  ///< what of the source it does not hold
};

namespace detail {

/// One resharding: a generation for a world of another size, written file by file.
class Resharding {
 public:
  Resharding(const Checkpoint& checkpoint, const std::filesystem::path& directory,
             const ReshardOptions& options)
      : checkpoint_(checkpoint),
        directory_(directory),
        files_(*options.files),
        options_(options),
        manifest_(checkpoint.manifest()) {
    if (options.world < 1 || options.world > ReshardOptions::max_world)
      throw std::invalid_argument("shardopt: reshard: world must be from 1 to " +
                                  std::to_string(ReshardOptions::max_world) + ", got " +
                                  std::to_string(options.world));
    require_no_generation(files_, directory);
    describe();
  }

  [[nodiscard]] ReshardReport run() {
    require_clean_folder(checkpoint_);
    place_ = place_of(directory_, begin_generation(files_, directory_), manifest_);
    try {
      write_all();
      commit(files_, place_, manifest_);
    } catch (...) {
      static_cast<void>(failure_of([&] { files_.remove(place_.saving); }));
      throw;
    }
    ReshardReport report{.generation = place_.complete, .bytes = bytes_};
    if (!keeps_extras()) report.notes = note_on_extras(checkpoint_.manifest());
    return report;
  }

 private:
  /// Files that are open at a time: systems allow a process some thousand.
  static constexpr std::size_t max_open = 256;

  /// A rank's file while it is written.
  struct Target {
    std::int64_t rank;
    std::string name;
    std::int64_t header_bytes;
    std::int64_t bytes;
    std::unique_ptr<WritableFile> file;
  };

  [[nodiscard]] bool keeps_extras() const {
    return !checkpoint_.merged() && checkpoint_.manifest().world == options_.world;
  }

  void describe() {
    manifest_.files.clear();
    manifest_.world = options_.world;
    manifest_.library_version = shardopt::text_of(version);
    if (!options_.sharding.empty()) manifest_.sharding = options_.sharding;
    with_sharding(manifest_.sharding, options_.bucket_bytes, [&](const auto& policy) {
      pieces_ = pieces_of_ranks(manifest_, policy, static_cast<int>(options_.world));
    });
  }

  void write_all() {
    const auto state_bytes = static_cast<std::int64_t>(manifest_.states.size() * sizeof(float));
    for (const auto& pieces : pieces_) total_ += 2 * elements_of(pieces) * state_bytes;
    for (std::size_t first = 0; first < pieces_.size(); first += max_open) {
      std::vector<Target> targets;
      for (std::size_t rank = first; rank < (std::min)(first + max_open, pieces_.size()); ++rank)
        targets.push_back(begin(static_cast<std::int64_t>(rank)));
      fill(targets, first == 0);
      for (Target& target : targets) finish(target);
    }
  }

  [[nodiscard]] Target begin(std::int64_t rank) {
    Target target{.rank = rank,
                  .name = shard_name(manifest_.coordinates, rank, manifest_.world),
                  .header_bytes = 0,
                  .bytes = 0,
                  .file = {}};
    const SafetensorsHeader header = shard_header(manifest_, rank, pieces_[static_cast<std::size_t>(rank)]);
    const std::string text = to_bytes(header);
    target.header_bytes = static_cast<std::int64_t>(text.size());
    target.bytes = target.header_bytes + header.data_bytes();
    target.file = files_.create(place_.saving / target.name);
    target.file->write_at(0, std::as_bytes(std::span(text)));
    return target;
  }

  /// Brings the numbers of some files from wherever the source has them.
  void fill(std::vector<Target>& targets, bool first_pass) {
    WantedStates wanted;
    std::int64_t missing = 0;
    for (std::size_t s = 0; s < manifest_.states.size(); ++s) add_wanted(targets, s, wanted);
    for (const Target& target : targets) missing += target.bytes - target.header_bytes;
    stream_states(
        checkpoint_, wanted, first_pass,
        [&](std::size_t target, std::int64_t offset, std::span<const std::byte> bytes) {
          targets[target].file->write_at(offset, bytes);
          missing -= static_cast<std::int64_t>(bytes.size());
          advance(static_cast<std::int64_t>(bytes.size()));
        },
        [](std::int64_t) {});
    if (missing != 0) {
      throw CheckpointError("shardopt: " + in_quotes(checkpoint_.path().string()) + " lacks " +
                            std::to_string(missing) + " bytes of its numbers");
    }
  }

  void add_wanted(const std::vector<Target>& targets, std::size_t state, WantedStates& wanted) const {
    for (std::size_t k = 0; k < targets.size(); ++k) {
      const auto& pieces = pieces_[static_cast<std::size_t>(targets[k].rank)];
      std::int64_t at =
          targets[k].header_bytes + static_cast<std::int64_t>(state * sizeof(float)) * elements_of(pieces);
      for (const auto& piece : pieces) {
        wanted.add(state, piece.parameter, piece.range, k, at);
        at += piece.range.size() * static_cast<std::int64_t>(sizeof(float));
      }
    }
  }

  /// Makes a file durable, reads it again for its checksums, and notes that it is complete.
  void finish(Target& target) {
    target.file->sync();
    target.file.reset();
    BlockChecksums checksums;
    const auto file = files_.open(place_.saving / target.name);
    std::vector<std::byte> block(static_cast<std::size_t>((std::min)(block_bytes, target.bytes)));
    for (std::int64_t at = 0; at < target.bytes; at += block_bytes) {
      const auto size = static_cast<std::size_t>((std::min)(block_bytes, target.bytes - at));
      file->read_at(at, std::span(block).first(size));
      checksums.add(std::span(block).first(size));
      advance((std::max)(std::int64_t{0},
                         at + static_cast<std::int64_t>(size) - (std::max)(at, target.header_bytes)));
    }
    const auto index = static_cast<std::size_t>(target.rank);
    Manifest::File described{
        .name = target.name, .bytes = target.bytes, .pieces = pieces_[index], .checksums = checksums.take()};
    if (keeps_extras()) described.extra = checkpoint_.manifest().files[index].extra;
    write_part(files_, place_, target.rank, described);
    bytes_ += target.bytes;
  }

  void advance(std::int64_t bytes) {
    done_ += bytes;
    if (options_.progress && bytes > 0) options_.progress(done_, total_);
  }

  const Checkpoint& checkpoint_;
  std::filesystem::path directory_;
  FileSystem& files_;
  const ReshardOptions& options_;
  Manifest manifest_;
  std::vector<std::vector<Manifest::Piece>> pieces_;
  SavePlace place_;
  std::int64_t bytes_ = 0;
  std::int64_t done_ = 0;
  std::int64_t total_ = 0;
};

}  // namespace detail

/// Writes a checkpoint as a new generation for a world of another size, as that world itself would have saved
/// it: each of its ranks reads only its own file. All ranks of a world can load a checkpoint of any other as
/// it is; this is for many loads, and for storage that each rank reaches only in part.
///
/// The source stays. As with a save, one rename makes the generation complete; it then is the newest of the
/// directory. Holds two blocks (1 MiB each) and lists of pieces, whatever the size.
/// @param checkpoint  a generation or a merged file
/// @param directory  of generations, may be the source's; no run may be saving into it meanwhile
/// @throws CheckpointError if the source is damaged, or files cannot be written; std::invalid_argument for a
/// world that is not legal, a policy that is not the library's, or bucket_bytes below 1. There is then no new
/// generation; only where nothing but the last fsync of the directory has failed is there one, a whole one,
/// which a loss of power may take away
inline ReshardReport reshard(const Checkpoint& checkpoint, const std::filesystem::path& directory,
                             const ReshardOptions& options) {
  return detail::Resharding(checkpoint, directory, options).run();
}

}  // namespace shardopt::inline v0::checkpoint
