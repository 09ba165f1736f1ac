// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The library's version. CMake reads it here, and the digests that ranks compare at start hold it.

#include <cstdint>
#include <string>

/// Changes where programs must be changed (while it is 0, SHARDOPT_VERSION_MINOR does).
#define SHARDOPT_VERSION_MAJOR 0
/// Changes where something is added.
#define SHARDOPT_VERSION_MINOR 1
/// Changes where only errors are corrected.
#define SHARDOPT_VERSION_PATCH 0

/// The interface's inline namespace: two versions of it can live in one program.
namespace shardopt::inline v0 {

/// A version number in its three parts.
struct Version {
  std::uint32_t major_number;                                    ///< changes where programs must be changed
  std::uint32_t minor_number;                                    ///< changes where something is added
  std::uint32_t patch_number;                                    ///< changes where only errors are corrected
  friend constexpr bool operator==(Version, Version) = default;  ///< part by part
};

/// The version of the headers that this translation unit was compiled with.
inline constexpr Version version{SHARDOPT_VERSION_MAJOR, SHARDOPT_VERSION_MINOR, SHARDOPT_VERSION_PATCH};

/// "0.1.0".
[[nodiscard]] inline std::string text_of(Version v) {
  return std::to_string(v.major_number) + "." + std::to_string(v.minor_number) + "." +
         std::to_string(v.patch_number);
}

}  // namespace shardopt::inline v0
