// SPDX-License-Identifier: Apache-2.0
// Steps to be counted (traffic.py).
//
// traffic CONFIGURATION LOOP STEPS: runs some steps of compute, step, plain or overlapped, and prints what
// one step must move at least, as JSON: bytes of all ranks together, and on the wire.
#include <bench/training.cuh>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string_view>

namespace {

namespace so = shardopt;

struct Configuration {
  std::string_view name;
  int ranks;
  int parameters;
  bool one_bucket;
  so::Reduction reduction;
  void (*run)(const Configuration&, bench::Loop, int steps);
};

constexpr std::int64_t elements = 262144;

template <class Rule, class Precision>
void run(const Configuration& configuration, bench::Loop loop, int steps) {
  const auto param = static_cast<std::int64_t>(sizeof(typename Precision::Param));
  const auto grad = static_cast<std::int64_t>(sizeof(typename Precision::Grad));
  const bench::Training training{
      .ranks = configuration.ranks,
      .elements = elements,
      .layers = configuration.parameters,
      .bucket_bytes = configuration.one_bucket ? elements * grad : elements * grad / 4,
      .layer_bytes = 4 * elements / configuration.parameters,
      .iterations = steps - 1,
      .loop = loop,
      .reduction = configuration.reduction};
  Rule rule{};
  if constexpr (std::is_same_v<Rule, so::SGD>) rule.momentum = 0.9;
  static_cast<void>(bench::run_training<Rule, Precision>(training, rule));
  const auto update = bench::update_traffic<Rule, Precision>(elements).total();
  std::printf(
      "{\"ranks\": %d, \"elements\": %lld, \"parameters\": %d, \"buckets\": %d, \"update_bytes\": %lld, "
      "\"norm_bytes\": %lld, "
      "\"wire_bytes\": %lld}\n",
      configuration.ranks, static_cast<long long>(elements), configuration.parameters,
      configuration.one_bucket ? 1 : 4, static_cast<long long>(update),
      static_cast<long long>(elements * grad),
      static_cast<long long>((configuration.ranks - 1) * elements * (param + grad)));
}

using Fp32 = so::FullPrecision;
using Bf16 = so::Mixed<so::bf16, so::bf16, float>;

constexpr std::array configurations{
    Configuration{"AdamW fp32, 1 rank", 1, 4, false, so::Reduction::native, run<so::AdamW, Fp32>},
    Configuration{"AdamW fp32, 4 ranks", 4, 4, false, so::Reduction::native, run<so::AdamW, Fp32>},
    Configuration{"AdamW fp32, 4 ranks, ordered", 4, 4, false, so::Reduction::ordered, run<so::AdamW, Fp32>},
    Configuration{"AdamW bf16, 1 rank", 1, 4, false, so::Reduction::native, run<so::AdamW, Bf16>},
    Configuration{"AdamW bf16, 4 ranks, ordered", 4, 4, false, so::Reduction::ordered, run<so::AdamW, Bf16>},
    Configuration{"SGD momentum fp32, 4 ranks", 4, 4, false, so::Reduction::native, run<so::SGD, Fp32>},
    Configuration{"AdamW fp32, 1 rank, one bucket of 1000", 1, 1000, true, so::Reduction::native,
                  run<so::AdamW, Fp32>},
    Configuration{"AdamW fp32, 4 ranks, one bucket of 1000", 4, 1000, true, so::Reduction::native,
                  run<so::AdamW, Fp32>},
};

constexpr std::array<std::string_view, 4> loops{"compute", "step", "plain", "overlapped"};

}  // namespace

int main(int argc, char** argv) try {
  if (argc == 2 && argv[1] == std::string_view("--list")) {
    for (const Configuration& configuration : configurations) std::printf("%s\n", configuration.name.data());
    return 0;
  }
  for (const Configuration& configuration : configurations) {
    if (argc != 4 || argv[1] != configuration.name) continue;
    for (std::size_t loop = 0; loop < loops.size(); ++loop) {
      if (argv[2] != loops[loop]) continue;
      configuration.run(configuration, static_cast<bench::Loop>(loop), std::atoi(argv[3]));
      return 0;
    }
  }
  std::fprintf(stderr, "usage: %s --list | CONFIGURATION compute|step|plain|overlapped STEPS\n", argv[0]);
  return 2;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
