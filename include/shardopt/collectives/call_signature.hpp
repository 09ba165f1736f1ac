// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/dtype.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <ios>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>

namespace shardopt::inline v0::detail {

/// A collective, as it travels.
enum class Operation : std::int32_t { none, reduce_scatter, all_gather, all_reduce, broadcast };

/// The name as it stands in messages; of whatever another rank has sent.
[[nodiscard]] constexpr std::string_view name_of(Operation operation) noexcept {
  constexpr std::array<std::string_view, 5> names = {"nothing", "reduce_scatter", "all_gather", "all_reduce",
                                                     "broadcast"};
  const auto index = static_cast<std::size_t>(operation);
  return index < names.size() ? names[index] : "?";
}

/// What ranks must agree on in a call. Has no padding: its bytes travel.
struct CallSignature {
  Operation operation = Operation::none;
  Dtype type = Dtype::uint8;
  std::array<std::uint8_t, 4 - sizeof(Dtype)> unused = {};
  std::int64_t count = 0;
  std::int64_t root = 0;
  std::uint64_t layout = 0;  ///< a digest of blocks and reduction
  std::array<std::uint64_t, 4> room = {};

  bool operator==(const CallSignature&) const = default;

  /// "reduce_scatter of 4096 bf16 (root 0, layout 5f0c1a…)".
  [[nodiscard]] std::string text() const {
    std::ostringstream result;
    result << name_of(operation) << " of " << count << ' ' << shardopt::name_of(type) << " (root " << root
           << ", layout " << std::hex << layout << ')';
    return result.str();
  }
};
static_assert(sizeof(CallSignature) == 64 && std::has_unique_object_representations_v<CallSignature>);

}  // namespace shardopt::inline v0::detail
