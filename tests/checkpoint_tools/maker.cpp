// SPDX-License-Identifier: Apache-2.0
/// checkpoint_maker DIRECTORY WORLD [ITERATION [SHARDING [SIZE]]]: saves a checkpoint of known numbers, for
/// tests in other languages. Element i of state s of parameter p is 1000 p + 100 s + (i mod 97) + 0.5, with
/// the states counted master, exp_avg, exp_avg_sq. SIZE: one parameter of so many elements instead of the
/// table below.
#include <checkpoint_tools/saved.hpp>

#include <cstdio>
#include <exception>
#include <string>

namespace {

using namespace test;

/// p in the order of the names' numbers.
constexpr std::array<std::string_view, 9> names{"embedding",       "empty",        "layer.1.bias",
                                                "layer.1.weight",  "layer.2.bias", "layer.2.weight",
                                                "layer.10.weight", "scale",        "all"};

float known(std::string_view parameter, std::string_view state, std::int64_t index) {
  const auto p = std::find(names.begin(), names.end(), parameter) - names.begin();
  const int s = state == "master" ? 0 : state == "exp_avg" ? 1 : 2;
  return static_cast<float>(1000 * p + 100 * s + index % 97) + 0.5f;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 3) throw std::invalid_argument("two arguments are needed");
  const std::string directory = argv[1];
  const int world = std::stoi(argv[2]);
  const std::int64_t iteration = argc > 3 ? std::stoll(argv[3]) : 20;
  const std::string sharding = argc > 4 ? argv[4] : "flat";
  std::vector<Packed> tensors = awkward_tensors();
  if (argc > 5) {
    tensors.clear();
    tensors.push_back({"all", {std::stoll(argv[5])}, "decay"});
  }
  checkpoint::SaveOptions options;
  options.extras = {{"schedule", "cosine"}};
  const std::int64_t bucket_bytes = argc > 5 ? 1 << 20 : 4096;
  const auto path = sharding == "flat"
                        ? save_numbers(directory, world, tensors, bucket_bytes, known, iteration, options)
                        : save_numbers<so::FullPrecision, so::PerParameterSharding>(
                              directory, world, tensors, bucket_bytes, known, iteration, options);
  std::printf("%s\n", path.c_str());
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "checkpoint_maker: %s\n", error.what());
  return 2;
}
