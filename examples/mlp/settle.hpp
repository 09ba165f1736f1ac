// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "digits.hpp"
#include "options.hpp"

#include <shardopt/collectives/process_place.hpp>

#include <optional>

namespace mlp {

/// Which of how many processes this one is: from the environment, or alone by --processes 1. Nothing where
/// ranks are threads, or this process is to start them.
/// @throws UsageError, std::invalid_argument if environment and options contradict each other or themselves
std::optional<shardopt::ProcessPlace> find_place(const Options& options);

/// Settles what depends on the machine and the data.
/// @throws UsageError if they do not allow what was asked for
void settle(Options& options, const Digits& digits, const std::optional<shardopt::ProcessPlace>& place);

}  // namespace mlp
