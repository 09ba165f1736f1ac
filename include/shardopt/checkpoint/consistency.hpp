// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/checkpoint/checksum.hpp>
#include <shardopt/checkpoint/manifest.hpp>
#include <shardopt/checkpoint/shard_file.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace shardopt::inline v0::checkpoint::detail {

/// Whether a manifest's parts fit each other. What is read of a file relies on all of this.
class ConsistencyCheck {
 public:
  /// @param what  names the manifest in messages
  ConsistencyCheck(const Manifest& manifest, std::string what)
      : manifest_(manifest), what_(std::move(what)) {}

  /// What must hold for a merged file, too. @throws CheckpointError naming the first part that does not fit
  void run_merged() const {
    if (!are_legal(manifest_.coordinates))
      refuse("has coordinates that no file can be named by: " + text_of(manifest_.coordinates));
    require_states();
    require_groups();
    require_parameters();
  }

  /// All that must hold. @throws CheckpointError naming the first part that does not fit
  void run() const {
    run_merged();
    if (static_cast<std::int64_t>(manifest_.files.size()) != manifest_.world) {
      refuse("names " + std::to_string(manifest_.files.size()) + " files for a world of " +
             std::to_string(manifest_.world));
    }
    std::set<std::string> names;
    for (const auto& file : manifest_.files) {
      if (!names.insert(file.name).second) refuse("names the file " + in_quotes(file.name) + " twice");
      require_file(file);
    }
    require_cover();
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    throw CheckpointError("shardopt: " + what_ + " " + why);
  }

  void require_states() const {
    const std::set<std::string> names(manifest_.states.begin(), manifest_.states.end());
    if (names.size() != manifest_.states.size() || names.contains("") || manifest_.states.empty() ||
        manifest_.states.back() != "master")
      refuse("must name each state once, \"master\" last");
  }

  void require_groups() const {
    std::set<std::string> names;
    for (const auto& group : manifest_.groups) {
      if (!names.insert(group.name).second) refuse("names the group " + in_quotes(group.name) + " twice");
    }
    for (const auto& parameter : manifest_.parameters) {
      if (parameter.has_state() && !names.contains(parameter.group))
        refuse("puts parameter " + in_quotes(parameter.name) + " into a group that it does not name");
    }
  }

  void require_parameters() const {
    std::map<std::string, const Manifest::Parameter*, std::less<>> seen;
    std::int64_t elements = 0;
    for (const auto& parameter : manifest_.parameters) {
      if (!seen.emplace(parameter.name, &parameter).second)
        refuse("names parameter " + in_quotes(parameter.name) + " twice");
      if (!parameter.alias_of.empty()) {
        const auto target = seen.find(parameter.alias_of);
        if (target == seen.end() || target->second->shape != parameter.shape || target->second == &parameter)
          refuse("makes " + in_quotes(parameter.name) +
                 " an alias of what is not a parameter before it of its shape");
        continue;
      }
      // All states of all parameters must be countable in bytes.
      const std::int64_t most =
          (std::numeric_limits<std::int64_t>::max)() / 8 / static_cast<std::int64_t>(manifest_.states.size());
      if (parameter.numel() > most - elements) refuse("has more elements than 64 bits can count bytes of");
      elements += parameter.numel();
    }
  }

  void require_file(const Manifest::File& file) const {
    const std::string name = "says of " + in_quotes(file.name) + " ";
    if (file.name.empty() || file.name == "." || file.name == ".." || file.name == manifest_name ||
        file.name.find('/') != std::string::npos || file.name.find('\0') != std::string::npos)
      refuse("names a file " + in_quotes(file.name) + ", which is no plain name");
    for (const auto& piece : file.pieces) {
      if (piece.parameter >= static_cast<std::int64_t>(manifest_.parameters.size()))
        refuse(name + "that it holds parameter " + std::to_string(piece.parameter) + ", of " +
               std::to_string(manifest_.parameters.size()));
      const auto& parameter = manifest_.parameters[static_cast<std::size_t>(piece.parameter)];
      if (!parameter.has_state() || piece.range.empty() || piece.range.begin < 0 ||
          piece.range.end > parameter.numel()) {
        refuse(name + "that it holds elements " + std::to_string(piece.range.begin) + ".." +
               std::to_string(piece.range.end) + " of " + in_quotes(parameter.name) +
               ", which has state for " + std::to_string(parameter.has_state() ? parameter.numel() : 0));
      }
    }
  }

  /// Every element once. Then the sizes are bounded by the table, and no sum below can overflow.
  void require_cover() const {
    std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t, const Manifest::File*>> pieces;
    for (const auto& file : manifest_.files) {
      for (const auto& piece : file.pieces)
        pieces.emplace_back(piece.parameter, piece.range.begin, piece.range.end, &file);
    }
    std::sort(pieces.begin(), pieces.end(), [](const auto& a, const auto& b) {
      return std::tie(std::get<0>(a), std::get<1>(a)) < std::tie(std::get<0>(b), std::get<1>(b));
    });
    auto at = pieces.begin();
    for (std::size_t k = 0; k < manifest_.parameters.size(); ++k) {
      const auto& parameter = manifest_.parameters[k];
      std::int64_t covered = 0;
      for (; at != pieces.end() && std::get<0>(*at) == static_cast<std::int64_t>(k); ++at) {
        const auto [index, begin, end, file] = *at;
        require_next(parameter.name, covered, begin, file->name);
        covered = end;
      }
      if (parameter.has_state()) require_next(parameter.name, covered, parameter.numel(), "");
    }
    for (const auto& file : manifest_.files) require_size(file);
  }

  void require_next(const std::string& parameter, std::int64_t covered, std::int64_t begin,
                    const std::string& file) const {
    if (begin > covered)
      refuse("has no file for elements " + std::to_string(covered) + ".." + std::to_string(begin) + " of " +
             in_quotes(parameter));
    if (begin < covered)
      refuse("has two files for elements " + std::to_string(begin) + ".. of " + in_quotes(parameter) +
             ": one of them is " + in_quotes(file));
  }

  void require_size(const Manifest::File& file) const {
    const std::int64_t payload = payload_bytes(manifest_, file);
    if (file.bytes < payload + 10 || file.bytes > payload + 8 + max_header_bytes)
      refuse("says that " + in_quotes(file.name) + " has " + std::to_string(file.bytes) + " bytes, but " +
             std::to_string(payload) + " of numbers");
    if (static_cast<std::int64_t>(file.checksums.size()) != blocks_in(file.bytes))
      refuse("has " + std::to_string(file.checksums.size()) + " checksums for the " +
             std::to_string(blocks_in(file.bytes)) + " blocks of " + in_quotes(file.name));
  }

  const Manifest& manifest_;
  std::string what_;
};

}  // namespace shardopt::inline v0::checkpoint::detail
