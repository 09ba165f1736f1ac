// SPDX-License-Identifier: Apache-2.0
// How much of an optimizer's communication is left beside a training loop's own work.
//
// overlap RANKS ELEMENTS LAYERS BUCKET_BYTES LAYER_BYTES ITERATIONS: one GPU a rank; each layer's forward and
// backward is a copy of LAYER_BYTES within the device. Prints milliseconds an iteration on rank 0, after one
// to warm up.
#include <bench/training.cuh>

#include <cstdio>
#include <cstdlib>
#include <exception>

int main(int argc, char** argv) try {
  if (argc != 7) {
    std::fprintf(stderr, "usage: %s RANKS ELEMENTS LAYERS BUCKET_BYTES LAYER_BYTES ITERATIONS\n", argv[0]);
    return 2;
  }
  const bench::Training training{.ranks = std::atoi(argv[1]),
                                 .elements = std::atoll(argv[2]),
                                 .layers = std::atoi(argv[3]),
                                 .bucket_bytes = std::atoll(argv[4]),
                                 .layer_bytes = std::atoll(argv[5]),
                                 .iterations = std::atoi(argv[6])};
  const float milliseconds = bench::run_training<shardopt::AdamW, shardopt::FullPrecision>(training, {});
  std::printf("%.4f\n", static_cast<double>(milliseconds));
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
