// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// The library's macros, all of them, and the checks of what it needs from the compiler.

#if defined(_MSVC_LANG) ? (_MSVC_LANG < 202002L) : (__cplusplus < 202002L)
#error "shardopt needs C++20: compile with -std=c++20 (CMake: target_compile_features(... cxx_std_20))"
#endif
#if !defined(__cpp_exceptions) && !defined(__EXCEPTIONS)
#error "shardopt reports errors by exceptions: do not compile it with -fno-exceptions"
#endif

/// Marks a function that runs on the host and, under a CUDA compiler, on the device too.
#if defined(__CUDACC__)
#define SHARDOPT_HD __host__ __device__
#else
#define SHARDOPT_HD
#endif

/// 1 where the host's kernels work on packs of eight floats by AVX2 and FMA instructions.
#if defined(__x86_64__)
#define SHARDOPT_HOST_AVX2 1
#define SHARDOPT_TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#else
#define SHARDOPT_HOST_AVX2 0
/// Lets a function use the instructions of the host's kernels, whatever the compiler's flags.
#define SHARDOPT_TARGET_AVX2
#endif

/// Marks a function of host and device that is inlined even without optimisation.
#define SHARDOPT_HD_INLINE SHARDOPT_HD inline __attribute__((always_inline))

/// Marks a function of a rule (or of math): inlined into the kernel, on the host with the kernel's
/// instruction set.
#define SHARDOPT_RULE SHARDOPT_HD SHARDOPT_TARGET_AVX2 inline __attribute__((always_inline))

/// Unrolls the loop that follows, so that arrays indexed by its counter stay in registers.
#if defined(__CUDA_ARCH__)
#define SHARDOPT_UNROLL _Pragma("unroll")
#elif defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#define SHARDOPT_UNROLL _Pragma("GCC unroll 24")
#else
#define SHARDOPT_UNROLL
#endif

/// Before a template of host and device that calls what it is given, be that of the host or of the device.
#if defined(__NVCC__)
#define SHARDOPT_CALLS_EITHER _Pragma("nv_exec_check_disable")
#else
#define SHARDOPT_CALLS_EITHER
#endif
