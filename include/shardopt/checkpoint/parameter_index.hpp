// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/manifest.hpp>

#include <cstddef>
#include <map>
#include <optional>
#include <string_view>

namespace shardopt::inline v0::checkpoint::detail {

/// Finds a manifest's parameters by their names. The manifest must outlive it, unchanged.
class ParameterIndex {
 public:
  explicit ParameterIndex(const Manifest& manifest) {
    for (std::size_t k = 0; k < manifest.parameters.size(); ++k)
      indices_.emplace(manifest.parameters[k].name, k);
  }

  /// Index of a parameter, or nothing.
  [[nodiscard]] std::optional<std::size_t> find(std::string_view name) const {
    const auto found = indices_.find(name);
    if (found == indices_.end()) return std::nullopt;
    return found->second;
  }

 private:
  std::map<std::string_view, std::size_t> indices_;
};

}  // namespace shardopt::inline v0::checkpoint::detail
