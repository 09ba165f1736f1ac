// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/checkpoint.hpp>
#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/checkpoint/commit.hpp>
#include <shardopt/checkpoint/extracts.hpp>
#include <shardopt/checkpoint/file_system.hpp>
#include <shardopt/checkpoint/manifest.hpp>
#include <shardopt/checkpoint/manifest_text.hpp>
#include <shardopt/checkpoint/numeric_order.hpp>
#include <shardopt/checkpoint/posix_files.hpp>
#include <shardopt/checkpoint/safetensors.hpp>
#include <shardopt/checkpoint/stream_states.hpp>
#include <shardopt/checkpoint/verify.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace shardopt::inline v0::checkpoint {

/// How a checkpoint is merged.
struct MergeOptions {
  bool overwrite = false;                       ///< whether a file that has the output's name is replaced
  Progress progress = {};                       ///< is told how many bytes of the source have been read
  FileSystem* files = &PosixFiles::instance();  ///< to write to; not null
};

/// What was merged.
struct MergeReport {
  std::filesystem::path file;           ///< the output
  std::int64_t bytes = 0;               ///< of it
  std::int64_t tensors = 0;             ///< in it
  std::vector<std::string> notes = {};  ///< what of the source it does not hold
};

namespace detail {

/// The parameters that have state, in numeric order of their names: indices in the manifest.
[[nodiscard]] inline std::vector<std::size_t> in_numeric_order(const Manifest& manifest) {
  std::vector<std::size_t> order;
  for (std::size_t k = 0; k < manifest.parameters.size(); ++k) {
    if (manifest.parameters[k].has_state()) order.push_back(k);
  }
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return numeric_less(manifest.parameters[a].name, manifest.parameters[b].name);
  });
  return order;
}

/// "rank 0's extra text" and so on stay behind where files of other ranks are made.
[[nodiscard]] inline std::vector<std::string> note_on_extras(const Manifest& manifest) {
  const auto with_text = std::count_if(manifest.files.begin(), manifest.files.end(),
                                       [](const auto& file) { return !file.extra.empty(); });
  if (with_text == 0) return {};
  return {"the texts that " + std::to_string(with_text) +
          " ranks saved for themselves stay in the source: they belong to ranks of another world"};
}

/// One merge: full tensors of all parameters and states into one file.
class Merging {
 public:
  Merging(const Checkpoint& checkpoint, std::filesystem::path output, const MergeOptions& options)
      : checkpoint_(checkpoint),
        manifest_(checkpoint.manifest()),
        output_(std::move(output)),
        files_(*options.files),
        options_(options) {
    folder_ = output_.has_parent_path() ? output_.parent_path() : std::filesystem::path(".");
    require_source();
    require_output();
    list_tensors();
  }

  [[nodiscard]] MergeReport run() {
    const auto unfinished = folder_ / (".merging-" + random_id());  // output's may be as long as names can be
    try {
      const std::int64_t bytes = write(unfinished);
      require_free();
      files_.rename(unfinished, output_);
      files_.sync_directory(folder_);
      return {output_, bytes, static_cast<std::int64_t>(header_.tensors.size()), note_on_extras(manifest_)};
    } catch (...) {
      static_cast<void>(failure_of([&] { files_.remove(unfinished); }));
      throw;
    }
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    throw CheckpointError("shardopt: " + in_quotes(checkpoint_.path().string()) + " was not merged: " + why);
  }

  void require_source() const {
    if (checkpoint_.merged()) refuse("it is one file with whole tensors already");
  }

  void require_output() const {
    if (output_.extension() != ".safetensors") {
      refuse("the output " + in_quotes(output_.string()) +
             " must be called .safetensors: that is what readers know a merged file by");
    }
    if (files_.exists(folder_ / manifest_name)) {
      refuse("the output " + in_quotes(output_.string()) +
             " would lie in a generation's folder, which holds its own files only");
    }
    for (const auto& entry : files_.list(folder_)) {
      if (entry.is_directory && entry.name == output_.filename())
        refuse("the output " + in_quotes(output_.string()) + " is a directory");
    }
    require_free();
  }

  void require_free() const {
    if (!options_.overwrite && files_.exists(output_))
      refuse(in_quotes(output_.string()) + " exists; MergeOptions::overwrite replaces it");
  }

  /// Numeric order, so that readers that list a file by offset list layer.2 before layer.10.
  void list_tensors() {
    Manifest described = manifest_;
    described.files.clear();
    header_.metadata = {{"format", "shardopt-merged"}, {merged_key, json_text(described)}};
    std::map<std::string, std::string> owners = {{"__metadata__", "the metadata of the file"}};
    std::vector<std::size_t> states(manifest_.states.size());
    for (std::size_t s = 0; s < states.size(); ++s) states[s] = (s + states.size() - 1) % states.size();
    for (const std::size_t k : in_numeric_order(manifest_)) {
      const auto& parameter = manifest_.parameters[k];
      for (const std::size_t s : states) {  // "master" is the last of the manifest, and first here
        const std::string& state = manifest_.states[s];
        const std::string name = merged_name(parameter.name, state);
        const std::string owner = (state == "master" ? "" : "state " + in_quotes(state) + " of ") +
                                  "parameter " + in_quotes(parameter.name);
        const auto [other, added] = owners.emplace(name, owner);
        if (!added) {
          refuse(other->second + " and " + owner + " would both be called " + in_quotes(name) +
                 "; one of the parameters needs another name");
        }
        header_.append(name, parameter.shape);
        wanted_.add(s, static_cast<std::int64_t>(k), {0, parameter.numel()}, 0,
                    header_.tensors.back().bytes.begin);
      }
    }
  }

  /// @return the file's size, when it is on stable storage
  [[nodiscard]] std::int64_t write(const std::filesystem::path& path) {
    const auto file = files_.create(path);
    const std::string header = to_bytes(header_);
    file->write_at(0, std::as_bytes(std::span(header)));
    const auto data = static_cast<std::int64_t>(header.size());
    const std::int64_t total = total_bytes(manifest_);
    std::int64_t written = 0;
    require_clean_folder(checkpoint_);
    stream_states(
        checkpoint_, wanted_, true,
        [&](std::size_t, std::int64_t offset, std::span<const std::byte> bytes) {
          file->write_at(data + offset, bytes);
          written += static_cast<std::int64_t>(bytes.size());
        },
        [&](std::int64_t read) {
          if (options_.progress) options_.progress(read, total);
        });
    if (written != header_.data_bytes()) {
      refuse("its files hold " + std::to_string(written) + " bytes of numbers, the tensors need " +
             std::to_string(header_.data_bytes()));
    }
    file->sync();
    return data + written;
  }

  const Checkpoint& checkpoint_;
  const Manifest& manifest_;
  std::filesystem::path output_;
  std::filesystem::path folder_;
  FileSystem& files_;
  const MergeOptions& options_;
  SafetensorsHeader header_;
  WantedStates wanted_;
};

}  // namespace detail

/// Writes one safetensors file with whole tensors in their shapes: each parameter in fp32 under its own name,
/// its states as "name/exp_avg", in numeric order of the names. Frozen parameters and aliases have no numbers
/// in a checkpoint and none here; the metadata hold the manifest, which names them. `load` and Checkpoint
/// read the file like any checkpoint.
///
/// Reads file by file, block by block, each verified; writes beside the output under another name, and gives
/// the file its name when it is on stable storage. Holds one block (1 MiB) beside the manifest, whatever the
/// size.
/// @param output  must end in ".safetensors", and not lie in a generation's folder
/// @throws CheckpointError if the source is damaged or merged already, names would collide, the output
/// exists, or it cannot be written; there is then no new file
inline MergeReport merge(const Checkpoint& checkpoint, const std::filesystem::path& output,
                         const MergeOptions& options = {}) {
  return detail::Merging(checkpoint, output, options).run();
}

}  // namespace shardopt::inline v0::checkpoint
