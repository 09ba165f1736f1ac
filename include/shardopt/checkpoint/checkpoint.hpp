// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/checkpoint/commit.hpp>
#include <shardopt/checkpoint/consistency.hpp>
#include <shardopt/checkpoint/file_system.hpp>
#include <shardopt/checkpoint/manifest.hpp>
#include <shardopt/checkpoint/manifest_text.hpp>
#include <shardopt/checkpoint/posix_files.hpp>
#include <shardopt/checkpoint/safetensors.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace shardopt::inline v0::checkpoint {

/// In a merged file's metadata: the manifest as JSON.
inline constexpr const char* merged_key = "shardopt";

/// The tensor of a whole state in a merged file: parameters have their own names, states "name/exp_avg".
[[nodiscard]] inline std::string merged_name(const std::string& parameter, const std::string& state) {
  return state == "master" ? parameter : parameter + "/" + state;
}

/// A checkpoint that can be read: a complete generation, or a merged file.
class Checkpoint {
 public:
  /// Opens a generation's folder or a merged file, and reads what it says about itself: the numbers are not
  /// read yet.
  /// @param files  must outlive it
  /// @throws CheckpointError if it is damaged, or there is none
  explicit Checkpoint(std::filesystem::path path, const FileSystem& files = PosixFiles::instance())
      : path_(std::move(path)), files_(&files) {
    const auto manifest_path = path_ / manifest_name;
    if (files.exists(manifest_path)) {
      manifest_ = manifest_from_text(detail::read_text(files, manifest_path), manifest_path.string());
    } else if (files.exists(path_ / ".")) {  // a folder
      throw CheckpointError("shardopt: " + detail::in_quotes(manifest_path.string()) +
                            " is missing: the folder holds no complete checkpoint");
    } else {
      open_merged();
    }
    if (!merged_) detail::ConsistencyCheck(manifest_, manifest_path.string()).run();
  }

  /// What it says about itself. A merged file counts as one file without checksums.
  [[nodiscard]] const Manifest& manifest() const noexcept { return manifest_; }
  /// The folder or the file.
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  /// Whether it is one file with whole tensors.
  [[nodiscard]] bool merged() const noexcept { return merged_; }
  /// Where it is read from.
  [[nodiscard]] const FileSystem& files() const noexcept { return *files_; }

  /// The path of one of the manifest's files.
  [[nodiscard]] std::filesystem::path path_of(std::size_t file) const {
    return merged_ ? path_ : path_ / manifest_.files[file].name;
  }

  /// Where the numbers of each state's pieces begin in a file: [state][piece], in bytes.
  [[nodiscard]] std::vector<std::vector<std::int64_t>> offsets(std::size_t file) const {
    if (merged_) return merged_offsets_;
    const Manifest::File& f = manifest_.files[file];
    std::int64_t at = f.bytes - payload_bytes(manifest_, f);
    std::vector<std::vector<std::int64_t>> result(manifest_.states.size());
    for (auto& state : result) {
      for (const auto& piece : f.pieces) {
        state.push_back(at);
        at += piece.range.size() * static_cast<std::int64_t>(sizeof(float));
      }
    }
    return result;
  }

 private:
  void open_merged() {
    merged_ = true;
    const std::string what = path_.string();
    const auto file = files_->open(path_);
    const std::int64_t bytes = file->size();
    const std::string text = header_text_of(*file, what);
    const std::int64_t data = 8 + static_cast<std::int64_t>(text.size());
    const SafetensorsHeader header = header_from_json(text, bytes - data, what);
    const auto described = header.metadata.find(merged_key);
    if (described == header.metadata.end())
      throw CheckpointError("shardopt: " + what + " is no merged checkpoint: its metadata lack '" +
                            merged_key + "'");
    const detail::Json json = detail::parse_json(described->second, what);
    manifest_ = detail::manifest_of(detail::JsonReader(json, what));
    detail::ConsistencyCheck(manifest_, what).run_merged();
    locate(header, data, bytes);
  }

  /// Finds each whole tensor. @throws CheckpointError if one is missing, of another shape, or unknown
  void locate(const SafetensorsHeader& header, std::int64_t data, std::int64_t bytes) {
    const std::string what = path_.string();
    std::map<std::string, const SafetensorsHeader::Tensor*> tensors;
    for (const auto& tensor : header.tensors) tensors.emplace(tensor.name, &tensor);
    Manifest::File file{.name = path_.filename().string(), .bytes = bytes, .pieces = {}, .checksums = {}};
    merged_offsets_.resize(manifest_.states.size());
    for (std::size_t k = 0; k < manifest_.parameters.size(); ++k) {
      const auto& parameter = manifest_.parameters[k];
      if (!parameter.has_state()) continue;
      const bool empty = parameter.numel() == 0;
      if (!empty) file.pieces.push_back({static_cast<std::int64_t>(k), {0, parameter.numel()}});
      for (std::size_t s = 0; s < manifest_.states.size(); ++s) {
        const std::string name = merged_name(parameter.name, manifest_.states[s]);
        const auto found = tensors.find(name);
        if (found == tensors.end() || found->second->shape != parameter.shape) {
          throw CheckpointError("shardopt: " + what + " has no tensor " + detail::in_quotes(name) +
                                " of shape " + parameter.shape.text());
        }
        if (!empty) merged_offsets_[s].push_back(data + found->second->bytes.begin);
        tensors.erase(found);
      }
    }
    if (!tensors.empty())
      throw CheckpointError("shardopt: " + what + " holds a tensor that its metadata do not know: " +
                            detail::in_quotes(tensors.begin()->first));
    manifest_.world = 1;
    manifest_.files = {file};
  }

  std::filesystem::path path_;
  const FileSystem* files_;
  Manifest manifest_;
  bool merged_ = false;
  std::vector<std::vector<std::int64_t>> merged_offsets_;
};

}  // namespace shardopt::inline v0::checkpoint
