// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/config.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace shardopt::inline v0 {

/// The element types of buffers that the library reads, writes or sends.
enum class Dtype : std::uint8_t { fp32, bf16, fp16, int64, uint8 };

/// A bfloat16: the upper half of an IEEE single. Storage only; arithmetic is done in fp32.
struct bf16 {
  /// As they lie in memory.
  std::uint16_t bits;
  friend constexpr bool operator==(bf16, bf16) = default;  ///< by bits
};

/// An IEEE half (binary16). Storage only; arithmetic is done in fp32.
struct fp16 {
  /// As they lie in memory.
  std::uint16_t bits;
  friend constexpr bool operator==(fp16, fp16) = default;  ///< by bits
};

/// Bytes of one element.
[[nodiscard]] constexpr std::size_t size_of(Dtype type) noexcept {
  switch (type) {
    case Dtype::fp32:
      return 4;
    case Dtype::bf16:
    case Dtype::fp16:
      return 2;
    case Dtype::int64:
      return 8;
    case Dtype::uint8:
      return 1;
  }
  return 0;
}

/// The name as it stands in messages and files: "fp32", "bf16", …
[[nodiscard]] constexpr std::string_view name_of(Dtype type) noexcept {
  switch (type) {
    case Dtype::fp32:
      return "fp32";
    case Dtype::bf16:
      return "bf16";
    case Dtype::fp16:
      return "fp16";
    case Dtype::int64:
      return "int64";
    case Dtype::uint8:
      return "uint8";
  }
  return "unknown";
}

/// Maps a C++ type to its Dtype; an engine's own 16-bit type joins by a specialisation
/// (cuda.cuh brings those of `__nv_bfloat16` and `__half`).
template <class T>
struct DtypeOf;
/// IEEE single.
template <>
struct DtypeOf<float> {
  /// The Dtype.
  static constexpr Dtype value = Dtype::fp32;
};
/// The library's bfloat16.
template <>
struct DtypeOf<bf16> {
  /// The Dtype.
  static constexpr Dtype value = Dtype::bf16;
};
/// The library's IEEE half.
template <>
struct DtypeOf<fp16> {
  /// The Dtype.
  static constexpr Dtype value = Dtype::fp16;
};

/// The Dtype of a C++ type.
template <class T>
inline constexpr Dtype dtype_of = DtypeOf<T>::value;

}  // namespace shardopt::inline v0
