// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint.hpp>
#include <support/scratch_files.hpp>
#include <support/small_engine.hpp>
#include <support/watched_files.hpp>

#include <bit>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// Checkpoints of known numbers for the tests of what works on checkpoints without an optimizer.
namespace test {

namespace checkpoint = so::checkpoint;

/// Names whose text order is not their numeric order; sizes 0, 1, 256 and its neighbours, primes; two groups;
/// a frozen parameter, an alias, a scalar.
[[nodiscard]] inline std::vector<Packed> awkward_tensors() {
  return {{"layer.10.weight", {3, 101}, "decay"},
          {"layer.2.weight", {257, 3}, "decay"},
          {"layer.2.bias", {1}, "plain"},
          {"empty", {0, 7}, "plain"},
          {"scale", {}, "plain"},
          {"positions", {5, 3}, "plain", true},
          {"layer.1.weight", {16, 16}, "decay"},
          {"head", {16, 16}, "decay", false, "layer.1.weight"},
          {"layer.1.bias", {255}, "plain"},
          {"embedding", {1009, 2}, "decay"}};
}

/// One number of a state: another one everywhere, here and there one that arithmetic would not keep.
[[nodiscard]] inline float number(std::string_view parameter, std::string_view state, std::int64_t index) {
  if (index % 251 == 17) return std::bit_cast<float>(0x7fc00000U + static_cast<std::uint32_t>(index % 1000));
  if (index % 251 == 18) return -0.0f;
  if (index % 251 == 19) return std::bit_cast<float>(1U);
  std::uint32_t seed = 17;
  for (const char letter : parameter) seed = seed * 31 + static_cast<unsigned char>(letter);
  for (const char letter : state) seed = seed * 37 + static_cast<unsigned char>(letter);
  return static_cast<float>((seed % 8191) * 1024 + static_cast<std::uint32_t>(index % 1024)) + 0.5f;
}

using Number = float (*)(std::string_view parameter, std::string_view state, std::int64_t index);

template <class Optimizer>
[[nodiscard]] typename Optimizer::Config two_groups(std::int64_t bucket_bytes) {
  typename Optimizer::Config config{.groups = {{"decay", {.lr = 1e-2, .weight_decay = 0.1}},
                                               {"plain", {.lr = 2e-2, .weight_decay = 0}},
                                               {"default", {}}}};
  config.sharding.bucket_bytes = bucket_bytes;
  return config;
}

/// Gives all states of all parameters their numbers.
template <class Optimizer>
void fill(Optimizer& optimizer, Number value) {
  for (const auto& entry : optimizer.table().entries()) {
    if (entry.frozen || entry.alias_of) continue;
    for (const std::string_view state : {"exp_avg", "exp_avg_sq", "master"}) {
      std::vector<float> values;
      for (std::int64_t i = 0; i < entry.numel; ++i) values.push_back(value(entry.name, state, i));
      optimizer.set_state(entry.name, state, values, {});
    }
  }
}

/// Saves a checkpoint of known numbers at a world. @return the generation
template <class Precision = so::FullPrecision, class Sharding = so::FlatSharding>
std::filesystem::path save_numbers(const std::filesystem::path& directory, int world,
                                   const std::vector<Packed>& tensors, std::int64_t bucket_bytes = 4096,
                                   Number value = number, std::int64_t iteration = 20,
                                   const checkpoint::SaveOptions& options = {}) {
  using Optimizer = ThreadsOptimizer<so::AdamW, Precision, Sharding>;
  const so::ParameterTable table = packed_table(tensors);
  QuickFiles files;
  return on_ranks(world, [&](HostThreads comm) {
    checkpoint::SaveOptions mine = options;
    mine.files = &files;
    if (!mine.rank_extra.empty()) mine.rank_extra += std::to_string(comm.rank());
    Engine<Optimizer> engine(table, two_groups<Optimizer>(bucket_bytes), std::move(comm));
    fill(engine.optimizer, value);
    so::StepCounters counters = engine.optimizer.counters({});
    counters.iteration = iteration;
    counters.updates = iteration - 1;
    engine.optimizer.set_counters(counters, {});
    return checkpoint::save(engine.optimizer, directory, mine, {}).generation;
  })[0];
}

/// Loads a checkpoint at a world. @return what is wrong with the numbers on rank 0 once all is gathered
template <class Precision = so::FullPrecision, class Sharding = so::FlatSharding>
[[nodiscard]] std::string wrong_after_load(const std::filesystem::path& path, int world,
                                           const std::vector<Packed>& tensors, Number value = number) {
  using Optimizer = ThreadsOptimizer<so::AdamW, Precision, Sharding>;
  const so::ParameterTable table = packed_table(tensors);
  return on_ranks(world, [&](HostThreads comm) -> std::string {
    Engine<Optimizer> engine(table, two_groups<Optimizer>(2048), std::move(comm));
    const auto report = checkpoint::load(engine.optimizer, path, {}, {});
    if (report.iteration != 20 || engine.optimizer.counters({}).updates != 19) return "counters";
    std::size_t seen = 0;
    for (const auto& full : engine.optimizer.gather_state(0, {})) {
      ++seen;
      for (std::size_t i = 0; i < full.values.size(); ++i) {
        const float expected = value(full.parameter, full.state, static_cast<std::int64_t>(i));
        if (std::bit_cast<std::uint32_t>(full.values[i]) != std::bit_cast<std::uint32_t>(expected))
          return std::string(full.parameter) + " " + std::string(full.state) + " " + std::to_string(i);
      }
    }
    return seen > 0 || engine.optimizer.rank() != 0 ? "" : "nothing was gathered";
  })[0];
}

[[nodiscard]] inline std::string content_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline void write_content(const std::filesystem::path& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
}

/// Flips one bit of a file.
inline void damage(const std::filesystem::path& path, std::size_t from_the_end) {
  std::string content = content_of(path);
  content[content.size() - from_the_end] = static_cast<char>(content[content.size() - from_the_end] ^ 4);
  write_content(path, content);
}

/// A file that a plain reader of the format's specification takes apart: knows nothing of the library.
struct PlainFile {
  nlohmann::json header;
  std::string data;

  explicit PlainFile(const std::filesystem::path& path) {
    const std::string content = content_of(path);
    std::uint64_t length = 0;
    std::memcpy(&length, content.data(), 8);
    header = nlohmann::json::parse(content.substr(8, length));
    data = content.substr(8 + length);
  }

  [[nodiscard]] std::vector<float> tensor(const std::string& name) const {
    const auto offsets = header.at(name).at("data_offsets").get<std::vector<std::size_t>>();
    std::vector<float> values((offsets[1] - offsets[0]) / sizeof(float));
    if (!values.empty()) std::memcpy(values.data(), data.data() + offsets[0], offsets[1] - offsets[0]);
    return values;
  }
};

}  // namespace test
