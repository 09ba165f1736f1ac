// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/error.hpp>

#include <string>

namespace shardopt::inline v0 {

/// A checkpoint cannot be written, read, or used as asked. Names the file and what would work; where ranks
/// work together every rank gets it.
class CheckpointError : public Error {
 public:
  /// @param text  the whole message
  using Error::Error;
};

}  // namespace shardopt::inline v0
