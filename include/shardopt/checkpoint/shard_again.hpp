// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/manifest.hpp>
#include <shardopt/checkpoint/shard_file.hpp>
#include <shardopt/core/dtype.hpp>
#include <shardopt/core/error.hpp>
#include <shardopt/sharding/flat_sharding.hpp>
#include <shardopt/sharding/per_parameter_sharding.hpp>
#include <shardopt/sharding/replicated.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace shardopt::inline v0::checkpoint::detail {

using namespace shardopt::detail;

/// Calls `use` with the library's policy of that name.
/// @throws std::invalid_argument for a name that is none of the library's
template <class Use>
void with_sharding(std::string_view name, std::int64_t bucket_bytes, const Use& use) {
  if (name == FlatSharding::name) return use(FlatSharding{.bucket_bytes = bucket_bytes});
  if (name == PerParameterSharding::name) return use(PerParameterSharding{.bucket_bytes = bucket_bytes});
  if (name == Replicated::name) return use(Replicated{.bucket_bytes = bucket_bytes});
  throw std::invalid_argument("shardopt: no sharding policy of the library is called " + in_quotes(name) +
                              "; there are " + in_quotes(FlatSharding::name) + ", " +
                              in_quotes(PerParameterSharding::name) + " and " + in_quotes(Replicated::name));
}

/// Bytes of one gradient on the wire, by the name of its type.
[[nodiscard]] inline std::int64_t gradient_bytes_of(const Manifest& manifest) {
  for (const Dtype type : {Dtype::fp32, Dtype::bf16, Dtype::fp16}) {
    if (manifest.gradient_type == name_of(type)) return static_cast<std::int64_t>(size_of(type));
  }
  throw std::invalid_argument("shardopt: gradients of type " + in_quotes(manifest.gradient_type) +
                              " are not known: fp32, bf16 and fp16 are");
}

/// The pieces that each rank of a world would save: in flat order, neighbours of one parameter joined.
template <class Policy>
[[nodiscard]] std::vector<std::vector<Manifest::Piece>> pieces_of_ranks(const Manifest& manifest,
                                                                        const Policy& policy, int world) {
  std::vector<std::int64_t> begins;
  std::vector<std::int64_t> parameters;
  std::int64_t elements = 0;
  for (std::size_t k = 0; k < manifest.parameters.size(); ++k) {
    const auto& parameter = manifest.parameters[k];
    if (!parameter.has_state() || parameter.numel() == 0) continue;
    begins.push_back(elements);
    parameters.push_back(static_cast<std::int64_t>(k));
    elements += parameter.numel();
  }
  const FlatSpace space{elements, begins};
  const ShardPlan plan = policy.plan(space, world, gradient_bytes_of(manifest));
  require_valid(space, plan, world);
  std::vector<std::vector<Manifest::Piece>> result(static_cast<std::size_t>(world));
  std::size_t at = 0;
  for (const OwnedRun& run : plan.runs) {
    auto& pieces = result[static_cast<std::size_t>(run.owner)];
    for (std::int64_t begin = run.flat.begin; begin < run.flat.end;) {
      while (space.end_of(at) <= begin) ++at;
      const std::int64_t end = (std::min)(run.flat.end, space.end_of(at));
      append_piece(pieces, parameters[at], {begin - begins[at], end - begins[at]});
      begin = end;
    }
  }
  return result;
}

}  // namespace shardopt::inline v0::checkpoint::detail
