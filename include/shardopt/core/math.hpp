// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The arithmetic that the bits of a result may depend on: shardopt::math.
///
/// Every operation is IEEE 754, rounded once to nearest even, subnormals kept, and is the same on host and
/// device. No compiler flag contracts, reorders or approximates it: on the device an operation is one PTX
/// instruction, on an x86-64 host one machine instruction that the compiler cannot look into. Only the sign
/// and payload of a NaN that an operation makes are left open. On the host the processor's rounding and
/// flush-to-zero modes still count: see FloatEnvironment.
///
/// Rules call these functions with `float` on the device and with Pack, eight floats, on the host.

#include <shardopt/core/config.hpp>
#include <shardopt/core/float_bits.hpp>
#include <shardopt/core/pack.hpp>

#include <cstdint>

namespace shardopt::inline v0 {

namespace detail {

#if !SHARDOPT_HOST_AVX2
/// Hides how a value was made, so that no operation merges with the next.
template <class T>
[[nodiscard]] inline T opaque(T value) noexcept {
  asm("" : "+m"(value));
  return value;
}
#endif

}  // namespace detail

namespace math {

/// Both masks.
[[nodiscard]] SHARDOPT_HD_INLINE bool logical_and(bool a, bool b) noexcept { return a && b; }

/// Either mask.
[[nodiscard]] SHARDOPT_HD_INLINE bool logical_or(bool a, bool b) noexcept { return a || b; }

/// The mask inverted.
[[nodiscard]] SHARDOPT_HD_INLINE bool logical_not(bool a) noexcept { return !a; }

/// a + b, rounded once.
[[nodiscard]] SHARDOPT_HD_INLINE float add(float a, float b) noexcept {
#if defined(__CUDA_ARCH__)
  float result;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#elif SHARDOPT_HOST_AVX2
  asm("addss %1, %0" : "+x"(a) : "x"(b));
  return a;
#else
  return detail::opaque(a + b);
#endif
}

/// a − b, rounded once.
[[nodiscard]] SHARDOPT_HD_INLINE float sub(float a, float b) noexcept {
#if defined(__CUDA_ARCH__)
  float result;
  asm("sub.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#elif SHARDOPT_HOST_AVX2
  asm("subss %1, %0" : "+x"(a) : "x"(b));
  return a;
#else
  return detail::opaque(a - b);
#endif
}

/// a · b, rounded once.
[[nodiscard]] SHARDOPT_HD_INLINE float mul(float a, float b) noexcept {
#if defined(__CUDA_ARCH__)
  float result;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#elif SHARDOPT_HOST_AVX2
  asm("mulss %1, %0" : "+x"(a) : "x"(b));
  return a;
#else
  return detail::opaque(a * b);
#endif
}

/// a / b, rounded once.
[[nodiscard]] SHARDOPT_HD_INLINE float div(float a, float b) noexcept {
#if defined(__CUDA_ARCH__)
  float result;
  asm("div.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#elif SHARDOPT_HOST_AVX2
  asm("divss %1, %0" : "+x"(a) : "x"(b));
  return a;
#else
  return detail::opaque(a / b);
#endif
}

/// a · b + c, rounded once. On x86-64 it needs a processor with FMA.
[[nodiscard]] SHARDOPT_HD_INLINE float fma(float a, float b, float c) noexcept {
#if defined(__CUDA_ARCH__)
  float result;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
  return result;
#elif SHARDOPT_HOST_AVX2
  asm("vfmadd231ss %2, %1, %0" : "+x"(c) : "x"(a), "x"(b));
  return c;
#else
  return detail::opaque(__builtin_fmaf(a, b, c));
#endif
}

/// The square root, rounded once; NaN for a negative number, −0 for −0.
[[nodiscard]] SHARDOPT_HD_INLINE float sqrt(float a) noexcept {
#if defined(__CUDA_ARCH__)
  float result;
  asm("sqrt.rn.f32 %0, %1;" : "=f"(result) : "f"(a));
  return result;
#elif SHARDOPT_HOST_AVX2
  asm("sqrtss %0, %0" : "+x"(a));
  return a;
#else
  return detail::opaque(__builtin_sqrtf(a));
#endif
}

/// |a|: the sign bit cleared, of NaN too.
[[nodiscard]] SHARDOPT_HD_INLINE float abs(float a) noexcept {
  return detail::float_from(detail::bits_of(a) & 0x7fffffffU);
}

/// −a: the sign bit flipped, of zero and NaN too.
[[nodiscard]] SHARDOPT_HD_INLINE float neg(float a) noexcept {
  return detail::float_from(detail::bits_of(a) ^ 0x80000000U);
}

/// The magnitude of the first with the sign bit of the second.
[[nodiscard]] SHARDOPT_HD_INLINE float copysign(float magnitude, float sign) noexcept {
  return detail::float_from((detail::bits_of(magnitude) & 0x7fffffffU) |
                            (detail::bits_of(sign) & 0x80000000U));
}

/// Whether a is neither infinite nor NaN, from its bits: no flag of the compiler changes the answer.
[[nodiscard]] SHARDOPT_HD_INLINE bool is_finite(float a) noexcept {
  return (detail::bits_of(a) & 0x7f800000U) != 0x7f800000U;
}

/// Whether a is NaN, from its bits.
[[nodiscard]] SHARDOPT_HD_INLINE bool is_nan(float a) noexcept {
  return (detail::bits_of(a) & 0x7fffffffU) > 0x7f800000U;
}

/// a < b; false where either is NaN.
[[nodiscard]] SHARDOPT_HD_INLINE bool less(float a, float b) noexcept {
#if defined(__CUDA_ARCH__)
  unsigned result;
  asm("{ .reg .pred holds; setp.lt.f32 holds, %1, %2; selp.u32 %0, 1, 0, holds; }"
      : "=r"(result)
      : "f"(a), "f"(b));
  return result != 0;
#elif SHARDOPT_HOST_AVX2
  asm("cmpltss %1, %0" : "+x"(a) : "x"(b));
  return detail::bits_of(a) != 0;
#else
  return a < b;
#endif
}

/// a ≤ b; false where either is NaN.
[[nodiscard]] SHARDOPT_HD_INLINE bool less_equal(float a, float b) noexcept {
#if defined(__CUDA_ARCH__)
  unsigned result;
  asm("{ .reg .pred holds; setp.le.f32 holds, %1, %2; selp.u32 %0, 1, 0, holds; }"
      : "=r"(result)
      : "f"(a), "f"(b));
  return result != 0;
#elif SHARDOPT_HOST_AVX2
  asm("cmpless %1, %0" : "+x"(a) : "x"(b));
  return detail::bits_of(a) != 0;
#else
  return a <= b;
#endif
}

/// a = b (−0 equals +0); false where either is NaN.
[[nodiscard]] SHARDOPT_HD_INLINE bool equal(float a, float b) noexcept {
#if defined(__CUDA_ARCH__)
  unsigned result;
  asm("{ .reg .pred holds; setp.eq.f32 holds, %1, %2; selp.u32 %0, 1, 0, holds; }"
      : "=r"(result)
      : "f"(a), "f"(b));
  return result != 0;
#elif SHARDOPT_HOST_AVX2
  asm("cmpeqss %1, %0" : "+x"(a) : "x"(b));
  return detail::bits_of(a) != 0;
#else
  return a == b;
#endif
}

/// a > b; false where either is NaN.
[[nodiscard]] SHARDOPT_HD_INLINE bool greater(float a, float b) noexcept { return less(b, a); }

/// a ≥ b; false where either is NaN.
[[nodiscard]] SHARDOPT_HD_INLINE bool greater_equal(float a, float b) noexcept { return less_equal(b, a); }

/// The first where the mask holds, else the second.
[[nodiscard]] SHARDOPT_HD_INLINE float select(bool mask, float yes, float no) noexcept {
  return mask ? yes : no;
}

/// The larger; NaN if either is NaN (the first if both are); the second if they are equal.
[[nodiscard]] SHARDOPT_HD_INLINE float maximum(float a, float b) noexcept {
  return select(logical_or(less(b, a), is_nan(a)), a, b);
}

/// The smaller; NaN if either is NaN (the first if both are); the second if they are equal.
[[nodiscard]] SHARDOPT_HD_INLINE float minimum(float a, float b) noexcept {
  return select(logical_or(less(a, b), is_nan(a)), a, b);
}

/// a + b, rounded once.
[[nodiscard]] SHARDOPT_HD_INLINE double add(double a, double b) noexcept {
#if defined(__CUDA_ARCH__)
  double result;
  asm("add.rn.f64 %0, %1, %2;" : "=d"(result) : "d"(a), "d"(b));
  return result;
#elif SHARDOPT_HOST_AVX2
  asm("addsd %1, %0" : "+x"(a) : "x"(b));
  return a;
#else
  return detail::opaque(a + b);
#endif
}

/// a − b, rounded once.
[[nodiscard]] SHARDOPT_HD_INLINE double sub(double a, double b) noexcept {
#if defined(__CUDA_ARCH__)
  double result;
  asm("sub.rn.f64 %0, %1, %2;" : "=d"(result) : "d"(a), "d"(b));
  return result;
#elif SHARDOPT_HOST_AVX2
  asm("subsd %1, %0" : "+x"(a) : "x"(b));
  return a;
#else
  return detail::opaque(a - b);
#endif
}

/// a · b, rounded once.
[[nodiscard]] SHARDOPT_HD_INLINE double mul(double a, double b) noexcept {
#if defined(__CUDA_ARCH__)
  double result;
  asm("mul.rn.f64 %0, %1, %2;" : "=d"(result) : "d"(a), "d"(b));
  return result;
#elif SHARDOPT_HOST_AVX2
  asm("mulsd %1, %0" : "+x"(a) : "x"(b));
  return a;
#else
  return detail::opaque(a * b);
#endif
}

/// a / b, rounded once.
[[nodiscard]] SHARDOPT_HD_INLINE double div(double a, double b) noexcept {
#if defined(__CUDA_ARCH__)
  double result;
  asm("div.rn.f64 %0, %1, %2;" : "=d"(result) : "d"(a), "d"(b));
  return result;
#elif SHARDOPT_HOST_AVX2
  asm("divsd %1, %0" : "+x"(a) : "x"(b));
  return a;
#else
  return detail::opaque(a / b);
#endif
}

/// a · b + c, rounded once. On x86-64 it needs a processor with FMA.
[[nodiscard]] SHARDOPT_HD_INLINE double fma(double a, double b, double c) noexcept {
#if defined(__CUDA_ARCH__)
  double result;
  asm("fma.rn.f64 %0, %1, %2, %3;" : "=d"(result) : "d"(a), "d"(b), "d"(c));
  return result;
#elif SHARDOPT_HOST_AVX2
  asm("vfmadd231sd %2, %1, %0" : "+x"(c) : "x"(a), "x"(b));
  return c;
#else
  return detail::opaque(__builtin_fma(a, b, c));
#endif
}

/// The square root, rounded once; NaN for a negative number, −0 for −0.
[[nodiscard]] SHARDOPT_HD_INLINE double sqrt(double a) noexcept {
#if defined(__CUDA_ARCH__)
  double result;
  asm("sqrt.rn.f64 %0, %1;" : "=d"(result) : "d"(a));
  return result;
#elif SHARDOPT_HOST_AVX2
  asm("sqrtsd %0, %0" : "+x"(a));
  return a;
#else
  return detail::opaque(__builtin_sqrt(a));
#endif
}

/// |a|: the sign bit cleared, of NaN too.
[[nodiscard]] SHARDOPT_HD_INLINE double abs(double a) noexcept {
  return detail::double_from(detail::bits_of(a) & 0x7fffffffffffffffULL);
}

/// −a: the sign bit flipped, of zero and NaN too.
[[nodiscard]] SHARDOPT_HD_INLINE double neg(double a) noexcept {
  return detail::double_from(detail::bits_of(a) ^ 0x8000000000000000ULL);
}

/// The magnitude of the first with the sign bit of the second.
[[nodiscard]] SHARDOPT_HD_INLINE double copysign(double magnitude, double sign) noexcept {
  return detail::double_from((detail::bits_of(magnitude) & 0x7fffffffffffffffULL) |
                             (detail::bits_of(sign) & 0x8000000000000000ULL));
}

/// Whether a is neither infinite nor NaN, from its bits: no flag of the compiler changes the answer.
[[nodiscard]] SHARDOPT_HD_INLINE bool is_finite(double a) noexcept {
  return (detail::bits_of(a) & 0x7ff0000000000000ULL) != 0x7ff0000000000000ULL;
}

/// Whether a is NaN, from its bits.
[[nodiscard]] SHARDOPT_HD_INLINE bool is_nan(double a) noexcept {
  return (detail::bits_of(a) & 0x7fffffffffffffffULL) > 0x7ff0000000000000ULL;
}

/// a < b; false where either is NaN.
[[nodiscard]] SHARDOPT_HD_INLINE bool less(double a, double b) noexcept {
#if defined(__CUDA_ARCH__)
  unsigned result;
  asm("{ .reg .pred holds; setp.lt.f64 holds, %1, %2; selp.u32 %0, 1, 0, holds; }"
      : "=r"(result)
      : "d"(a), "d"(b));
  return result != 0;
#elif SHARDOPT_HOST_AVX2
  asm("cmpltsd %1, %0" : "+x"(a) : "x"(b));
  return detail::bits_of(a) != 0;
#else
  return a < b;
#endif
}

/// a ≤ b; false where either is NaN.
[[nodiscard]] SHARDOPT_HD_INLINE bool less_equal(double a, double b) noexcept {
#if defined(__CUDA_ARCH__)
  unsigned result;
  asm("{ .reg .pred holds; setp.le.f64 holds, %1, %2; selp.u32 %0, 1, 0, holds; }"
      : "=r"(result)
      : "d"(a), "d"(b));
  return result != 0;
#elif SHARDOPT_HOST_AVX2
  asm("cmplesd %1, %0" : "+x"(a) : "x"(b));
  return detail::bits_of(a) != 0;
#else
  return a <= b;
#endif
}

/// a = b (−0 equals +0); false where either is NaN.
[[nodiscard]] SHARDOPT_HD_INLINE bool equal(double a, double b) noexcept {
#if defined(__CUDA_ARCH__)
  unsigned result;
  asm("{ .reg .pred holds; setp.eq.f64 holds, %1, %2; selp.u32 %0, 1, 0, holds; }"
      : "=r"(result)
      : "d"(a), "d"(b));
  return result != 0;
#elif SHARDOPT_HOST_AVX2
  asm("cmpeqsd %1, %0" : "+x"(a) : "x"(b));
  return detail::bits_of(a) != 0;
#else
  return a == b;
#endif
}

/// a > b; false where either is NaN.
[[nodiscard]] SHARDOPT_HD_INLINE bool greater(double a, double b) noexcept { return less(b, a); }

/// a ≥ b; false where either is NaN.
[[nodiscard]] SHARDOPT_HD_INLINE bool greater_equal(double a, double b) noexcept { return less_equal(b, a); }

/// The first where the mask holds, else the second.
[[nodiscard]] SHARDOPT_HD_INLINE double select(bool mask, double yes, double no) noexcept {
  return mask ? yes : no;
}

/// The larger; NaN if either is NaN (the first if both are); the second if they are equal.
[[nodiscard]] SHARDOPT_HD_INLINE double maximum(double a, double b) noexcept {
  return select(logical_or(less(b, a), is_nan(a)), a, b);
}

/// The smaller; NaN if either is NaN (the first if both are); the second if they are equal.
[[nodiscard]] SHARDOPT_HD_INLINE double minimum(double a, double b) noexcept {
  return select(logical_or(less(a, b), is_nan(a)), a, b);
}

/// The same number as a double.
[[nodiscard]] SHARDOPT_HD_INLINE double widen(float a) noexcept {
#if defined(__CUDA_ARCH__)
  double result;
  asm("cvt.f64.f32 %0, %1;" : "=d"(result) : "f"(a));
  return result;
#elif SHARDOPT_HOST_AVX2
  double result;
  asm("cvtss2sd %1, %0" : "=x"(result) : "x"(a));
  return result;
#else
  return static_cast<double>(a);
#endif
}

/// The float nearest to a.
[[nodiscard]] SHARDOPT_HD_INLINE float narrow(double a) noexcept {
#if defined(__CUDA_ARCH__)
  float result;
  asm("cvt.rn.f32.f64 %0, %1;" : "=f"(result) : "d"(a));
  return result;
#elif SHARDOPT_HOST_AVX2
  float result;
  asm("cvtsd2ss %1, %0" : "=x"(result) : "x"(a));
  return result;
#else
  return detail::opaque(static_cast<float>(a));
#endif
}

/// base^exponent by repeated squaring: the same bits everywhere (library functions differ), relative error
/// below 1.2e-16 times the exponent; 1 for exponent 0.
[[nodiscard]] SHARDOPT_HD inline double pow(double base, std::uint64_t exponent) noexcept {
  double result = 1.0;
  for (double square = base; exponent != 0; square = mul(square, square), exponent >>= 1) {
    if ((exponent & 1) != 0) result = mul(result, square);
  }
  return result;
}

}  // namespace math

}  // namespace shardopt::inline v0
