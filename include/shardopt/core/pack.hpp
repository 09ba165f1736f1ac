// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// Pack, the value type of rules on x86-64 hosts, and shardopt::math on it. Include math.hpp, which brings
/// the scalars too.

#include <shardopt/core/config.hpp>

#if SHARDOPT_HOST_AVX2

#include <cstdint>

namespace shardopt::inline v0 {

namespace detail {

// nvcc allows no vector types in the signature of a device function, even of one that is never called there.
// Its device pass sees arrays of the same size instead, and no pack is ever made in it.
#if defined(__CUDA_ARCH__)
struct alignas(32) PackFloats {
  float lanes[8];
};
struct alignas(32) PackBits {
  std::uint32_t lanes[8];
};
#else
using PackFloats = float __attribute__((vector_size(32), may_alias));
using PackBits = std::int32_t __attribute__((vector_size(32), may_alias));
#endif

}  // namespace detail

/// Eight floats that travel together through a rule on the host. A number becomes a pack of eight copies of
/// itself.
///
/// Operations on packs are the functions of shardopt::math; each gives in every lane the bits of the same
/// function on floats. They are inlined into functions marked SHARDOPT_RULE or SHARDOPT_TARGET_AVX2 only.
struct Pack {
  static constexpr int size = 8;  ///< lanes

  Pack() = default;
  // NOLINTNEXTLINE(google-explicit-constructor): rules mix numbers and packs
  /// The same value in all lanes.
  SHARDOPT_RULE Pack(float value) noexcept : v{value, value, value, value, value, value, value, value} {}
  /// From the compiler's own vector.
  SHARDOPT_RULE explicit Pack(detail::PackFloats lanes) noexcept : v(lanes) {}

  detail::PackFloats v;  ///< the lanes
};

/// Eight truth values: what comparing packs gives. All bits of a lane are equal.
struct PackMask {
  detail::PackBits v;  ///< the lanes: 0 or −1
};

namespace math {

/// a + b in each lane.
[[nodiscard]] SHARDOPT_RULE Pack add(Pack a, Pack b) noexcept {
#if !defined(__CUDA_ARCH__)
  asm("vaddps %2, %1, %0" : "=x"(a.v) : "x"(a.v), "x"(b.v));
#endif
  return a;
}

/// a − b in each lane.
[[nodiscard]] SHARDOPT_RULE Pack sub(Pack a, Pack b) noexcept {
#if !defined(__CUDA_ARCH__)
  asm("vsubps %2, %1, %0" : "=x"(a.v) : "x"(a.v), "x"(b.v));
#endif
  return a;
}

/// a · b in each lane.
[[nodiscard]] SHARDOPT_RULE Pack mul(Pack a, Pack b) noexcept {
#if !defined(__CUDA_ARCH__)
  asm("vmulps %2, %1, %0" : "=x"(a.v) : "x"(a.v), "x"(b.v));
#endif
  return a;
}

/// a / b in each lane.
[[nodiscard]] SHARDOPT_RULE Pack div(Pack a, Pack b) noexcept {
#if !defined(__CUDA_ARCH__)
  asm("vdivps %2, %1, %0" : "=x"(a.v) : "x"(a.v), "x"(b.v));
#endif
  return a;
}

/// a · b + c in each lane, rounded once.
[[nodiscard]] SHARDOPT_RULE Pack fma(Pack a, Pack b, Pack c) noexcept {
#if !defined(__CUDA_ARCH__)
  asm("vfmadd231ps %2, %1, %0" : "+x"(c.v) : "x"(a.v), "x"(b.v));
#endif
  return c;
}

/// The square root of each lane.
[[nodiscard]] SHARDOPT_RULE Pack sqrt(Pack a) noexcept {
#if !defined(__CUDA_ARCH__)
  asm("vsqrtps %1, %0" : "=x"(a.v) : "x"(a.v));
#endif
  return a;
}

/// Both masks.
[[nodiscard]] SHARDOPT_RULE PackMask logical_and(PackMask a, PackMask b) noexcept {
#if !defined(__CUDA_ARCH__)
  a.v = a.v & b.v;
#endif
  return a;
}

/// Either mask.
[[nodiscard]] SHARDOPT_RULE PackMask logical_or(PackMask a, PackMask b) noexcept {
#if !defined(__CUDA_ARCH__)
  a.v = a.v | b.v;
#endif
  return a;
}

/// The mask inverted.
[[nodiscard]] SHARDOPT_RULE PackMask logical_not(PackMask a) noexcept {
#if !defined(__CUDA_ARCH__)
  a.v = ~a.v;
#endif
  return a;
}

/// Lanes where a < b; not those where either is NaN.
[[nodiscard]] SHARDOPT_RULE PackMask less(Pack a, Pack b) noexcept {
  PackMask mask{};
#if !defined(__CUDA_ARCH__)
  asm("vcmpltps %2, %1, %0" : "=x"(mask.v) : "x"(a.v), "x"(b.v));
#endif
  return mask;
}

/// Lanes where a ≤ b; not those where either is NaN.
[[nodiscard]] SHARDOPT_RULE PackMask less_equal(Pack a, Pack b) noexcept {
  PackMask mask{};
#if !defined(__CUDA_ARCH__)
  asm("vcmpleps %2, %1, %0" : "=x"(mask.v) : "x"(a.v), "x"(b.v));
#endif
  return mask;
}

/// Lanes where a = b (−0 equals +0); not those where either is NaN.
[[nodiscard]] SHARDOPT_RULE PackMask equal(Pack a, Pack b) noexcept {
  PackMask mask{};
#if !defined(__CUDA_ARCH__)
  asm("vcmpeqps %2, %1, %0" : "=x"(mask.v) : "x"(a.v), "x"(b.v));
#endif
  return mask;
}

/// Lanes where a > b; not those where either is NaN.
[[nodiscard]] SHARDOPT_RULE PackMask greater(Pack a, Pack b) noexcept { return less(b, a); }

/// Lanes where a ≥ b; not those where either is NaN.
[[nodiscard]] SHARDOPT_RULE PackMask greater_equal(Pack a, Pack b) noexcept { return less_equal(b, a); }

/// Lanes that are NaN.
[[nodiscard]] SHARDOPT_RULE PackMask is_nan(Pack a) noexcept {
  PackMask mask{};
#if !defined(__CUDA_ARCH__)
  asm("vcmpunordps %1, %1, %0" : "=x"(mask.v) : "x"(a.v));
#endif
  return mask;
}

/// Lanes that are neither infinite nor NaN, from their bits.
[[nodiscard]] SHARDOPT_RULE PackMask is_finite(Pack a) noexcept {
  PackMask mask{};
#if !defined(__CUDA_ARCH__)
  auto bits = reinterpret_cast<detail::PackBits>(a.v);
  asm(""
      : "+x"(bits));  // what is known of the floats (that they are "never NaN") must not reach tests of their
                      // bits
  mask.v = (bits & 0x7f800000) != 0x7f800000;
#endif
  return mask;
}

/// In each lane the second argument where the mask holds, else the third.
[[nodiscard]] SHARDOPT_RULE Pack select(PackMask mask, Pack yes, Pack no) noexcept {
#if !defined(__CUDA_ARCH__)
  asm("vblendvps %3, %2, %1, %0" : "=x"(no.v) : "x"(no.v), "x"(yes.v), "x"(mask.v));
#endif
  return no;
}

/// The second argument if the first is true, else the third.
[[nodiscard]] SHARDOPT_RULE Pack select(bool mask, Pack yes, Pack no) noexcept { return mask ? yes : no; }

/// The larger in each lane; NaN if either is NaN (a if both are); b if they are equal.
[[nodiscard]] SHARDOPT_RULE Pack maximum(Pack a, Pack b) noexcept {
  Pack larger = b;
#if !defined(__CUDA_ARCH__)
  asm("vmaxps %2, %1, %0"
      : "=x"(larger.v)
      : "x"(a.v), "x"(b.v));  // gives b where either is NaN or both are zero
#endif
  return select(is_nan(a), a, larger);
}

/// The smaller in each lane; NaN if either is NaN (a if both are); b if they are equal.
[[nodiscard]] SHARDOPT_RULE Pack minimum(Pack a, Pack b) noexcept {
  Pack smaller = b;
#if !defined(__CUDA_ARCH__)
  asm("vminps %2, %1, %0" : "=x"(smaller.v) : "x"(a.v), "x"(b.v));
#endif
  return select(is_nan(a), a, smaller);
}

/// |a| in each lane: the sign bit cleared, of NaN too.
[[nodiscard]] SHARDOPT_RULE Pack abs(Pack a) noexcept {
#if !defined(__CUDA_ARCH__)
  a.v = reinterpret_cast<detail::PackFloats>(reinterpret_cast<detail::PackBits>(a.v) & 0x7fffffff);
#endif
  return a;
}

/// −a in each lane: the sign bit flipped, of zero and NaN too.
[[nodiscard]] SHARDOPT_RULE Pack neg(Pack a) noexcept {
#if !defined(__CUDA_ARCH__)
  a.v = reinterpret_cast<detail::PackFloats>(reinterpret_cast<detail::PackBits>(a.v) ^ (-0x7fffffff - 1));
#endif
  return a;
}

/// The magnitude of the first with the sign bit of the second, in each lane.
[[nodiscard]] SHARDOPT_RULE Pack copysign(Pack magnitude, Pack sign) noexcept {
#if !defined(__CUDA_ARCH__)
  const auto kept = reinterpret_cast<detail::PackBits>(magnitude.v) & 0x7fffffff;
  const auto bit = reinterpret_cast<detail::PackBits>(sign.v) & (-0x7fffffff - 1);
  magnitude.v = reinterpret_cast<detail::PackFloats>(kept | bit);
#endif
  return magnitude;
}

}  // namespace math

}  // namespace shardopt::inline v0

#endif  // SHARDOPT_HOST_AVX2
