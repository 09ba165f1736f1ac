// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/config.hpp>

#include <dlfcn.h>

#if SHARDOPT_HOST_AVX2
#include <immintrin.h>
#endif

#include <iostream>
#include <stdexcept>
#include <string>

namespace bits {

/// The options of a host program.
struct Options {
  std::string golden;  ///< the file to compare with; empty: print
  bool skip = false;   ///< whether this processor lacks what the host's kernels need
};

/// Reads the options and does what they say to the process: --flush turns flush-to-zero and rounding upwards
/// on, --load loads a shared object, as an engine's plug-in would be.
inline Options prepare(int argc, char** argv) {
  Options options;
#if SHARDOPT_HOST_AVX2
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    std::cout << "skipped: this processor has no AVX2 and FMA\n";
    options.skip = true;
    return options;
  }
#endif
  for (int k = 1; k < argc; ++k) {
    const std::string option = argv[k];
    if (option == "--flush") {
#if SHARDOPT_HOST_AVX2
      constexpr unsigned flush_to_zero_and_round_up = 0xc040;
      _mm_setcsr(_mm_getcsr() | flush_to_zero_and_round_up);
#endif
    } else if (option == "--golden" && k + 1 < argc) {
      options.golden = argv[++k];
    } else if (option == "--load" && k + 1 < argc) {
      if (dlopen(argv[++k], RTLD_NOW) == nullptr) throw std::runtime_error(dlerror());
    } else {
      throw std::runtime_error("unknown option: " + option);
    }
  }
#if SHARDOPT_HOST_AVX2
  constexpr unsigned rounding_and_flushing = 0xe040;
  if (!options.golden.empty()) {
    std::cout << "modes of the processor: " << std::hex << (_mm_getcsr() & rounding_and_flushing) << std::dec
              << '\n';
  }
#endif
  return options;
}

}  // namespace bits
