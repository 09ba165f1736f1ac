// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/dtype.hpp>
#include <shardopt/core/error.hpp>
#include <shardopt/zero/config.hpp>
#include <shardopt/zero/shard_layout.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace shardopt::inline v0::detail {

/// Tells the observer what of a set-up is legal and probably not meant.
template <class Rule, class Sharding>
void tell_warnings(const ShardLayout& layout, const OptimizerConfig<Rule, Sharding>& config,
                   Dtype gradients) {
  if (config.observer == nullptr) return;
  std::vector<bool> used(config.groups.size(), false);
  for (const Bucket& bucket : layout.buckets()) {
    for (const Segment& segment : bucket.segments) used[segment.group] = true;
  }
  for (std::size_t g = 0; g < used.size(); ++g) {
    if (!used[g]) {
      config.observer->warning("group " + in_quotes(config.groups[g].name) +
                               " holds no element of a trainable parameter");
    }
  }
  if (layout.updated_elements() == 0 && layout.elements() > 0) {
    config.observer->warning("rank " + std::to_string(layout.rank()) + " of " +
                             std::to_string(layout.world()) + " owns none of the " +
                             std::to_string(layout.elements()) + " elements: they are dealt in runs of " +
                             std::to_string(grain_elements));
  }
  if (config.loss_scale && gradients != Dtype::fp16) {
    config.observer->warning("config.loss_scale is set, but gradients are " +
                             std::string(name_of(gradients)) + ", which need none");
  }
}

}  // namespace shardopt::inline v0::detail
