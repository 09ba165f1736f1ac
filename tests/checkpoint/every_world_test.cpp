// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_test_macros.hpp>
#include <shardopt/checkpoint.hpp>
#include <support/scratch_files.hpp>
#include <support/small_engine.hpp>

#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

using namespace test;
namespace checkpoint = so::checkpoint;

namespace {

/// All tensors of a checkpoint by "parameter/state": bits of whole states, whoever saved them.
using Tensors = std::map<std::string, std::vector<std::uint32_t>>;

Tensors tensors_of(const std::filesystem::path& path, const checkpoint::FileSystem& files) {
  const checkpoint::Checkpoint saved(checkpoint::newest(path, files), files);
  const auto& manifest = saved.manifest();
  Tensors tensors;
  for (std::size_t file = 0; file < manifest.files.size(); ++file) {
    const auto opened = files.open(saved.path_of(file));
    const auto offsets = saved.offsets(file);
    for (std::size_t s = 0; s < offsets.size(); ++s) {
      for (std::size_t p = 0; p < offsets[s].size(); ++p) {
        const auto& piece = manifest.files[file].pieces[p];
        const auto& parameter = manifest.parameters[static_cast<std::size_t>(piece.parameter)];
        auto& tensor = tensors[parameter.name + "/" + manifest.states[s]];
        tensor.resize(static_cast<std::size_t>(parameter.numel()));
        opened->read_at(offsets[s][p], std::as_writable_bytes(std::span(tensor).subspan(
                                           static_cast<std::size_t>(piece.range.begin),
                                           static_cast<std::size_t>(piece.range.size()))));
      }
    }
  }
  return tensors;
}

so::ParameterTable awkward_table() {
  return packed_table({{"embedding", {31, 19}, "decay"},
                       {"scale", {1}, "plain"},
                       {"nothing", {0}, "plain"},
                       {"frozen", {7}, "plain", true},
                       {"bias", {257}, "plain"},
                       {"head", {31, 19}, "decay", false, "embedding"},
                       {"weight", {256, 3}, "decay"},
                       {"last", {3}, "decay"}});
}

/// Saves, or loads and saves, with one set of policies.
struct Kind {
  std::string name;
  std::function<void(int world, const std::filesystem::path&, checkpoint::FileSystem&)> train;
  std::function<void(int world, const std::filesystem::path& from, const std::filesystem::path& to,
                     checkpoint::FileSystem&)>
      pass_on;
};

template <class Optimizer>
void configure(typename Optimizer::Config& config, std::int64_t bucket_bytes) {
  config.groups = {{"decay", {.lr = 1e-2, .weight_decay = 0.1}}, {"plain", {.lr = 3e-2}}};
  if constexpr (requires { config.sharding.bucket_bytes; }) config.sharding.bucket_bytes = bucket_bytes;
}

template <class Sharding, class Precision>
Kind kind(const std::string& name, std::int64_t bucket_bytes) {
  using Optimizer = ThreadsOptimizer<so::AdamW, Precision, Sharding>;
  const auto with_engine = [bucket_bytes](int world, const auto& body) {
    HostThreads::run(world, [&](HostThreads comm) {
      typename Optimizer::Config config;
      configure<Optimizer>(config, bucket_bytes);
      Engine<Optimizer> engine(awkward_table(), config, std::move(comm), 0.5);
      body(engine);
    });
  };
  return {name,
          [=](int world, const std::filesystem::path& to, checkpoint::FileSystem& files) {
            with_engine(world, [&](Engine<Optimizer>& engine) {
              for (int step = 0; step < 3; ++step) {
                engine.set_gradients(
                    [&](std::int64_t i) { return std::sin(0.1 * static_cast<double>(i) + step); });
                engine.step({.lr_factor = 1.0f / static_cast<float>(step + 1)});
              }
              checkpoint::save(engine.optimizer, to, {.extras = {{"seed", "7"}}, .files = &files}, {});
            });
          },
          [=](int world, const std::filesystem::path& from, const std::filesystem::path& to,
              checkpoint::FileSystem& files) {
            with_engine(world, [&](Engine<Optimizer>& engine) {
              checkpoint::load(engine.optimizer, from, {.files = &files}, {});
              engine.optimizer.verify_parameters({});
              checkpoint::save(engine.optimizer, to, {.files = &files}, {});
            });
          }};
}

std::vector<Kind> kinds() {
  using Bf16 = so::Mixed<so::bf16, float, float>;
  using Fp16 = so::Mixed<so::fp16, so::fp16, float>;
  // Every pair of policies and every pair of precisions is among their pairs.
  return {kind<so::FlatSharding, so::FullPrecision>("flat, fp32", 1024),
          kind<so::FlatSharding, Bf16>("flat, bf16", 1 << 20),
          kind<so::PerParameterSharding, Fp16>("per parameter, fp16", 700),
          kind<so::Replicated, so::FullPrecision>("replicated, fp32", 1024),
          kind<so::Replicated, Bf16>("replicated, bf16", 3000)};
}

/// Saved by one kind at one world, loaded and saved by another at another world, and back.
void there_and_back(const Kind& one, int world, const Kind& other, int other_world) {
  CAPTURE(one.name, world, other.name, other_world);
  const ScratchFolder folder;
  QuickFiles files;
  one.train(world, folder / "first", files);
  other.pass_on(other_world, folder / "first", folder / "second", files);
  one.pass_on(world, folder / "second", folder / "third", files);
  const Tensors first = tensors_of(folder / "first", files);
  REQUIRE(first.size() == 5 * 3);
  REQUIRE(first.at("bias/exp_avg").size() == 257);
  CHECK(tensors_of(folder / "second", files) == first);
  CHECK(tensors_of(folder / "third", files) == first);
}

}  // namespace

TEST_CASE("Saved at N, loaded at M, saved at N: the first tensors come back, bit for bit",
          "[checkpoint][host][law8]") {
  const std::vector<Kind> all = kinds();
  std::size_t turn = 0;
  for (int world = 1; world <= 8; ++world) {
    for (int other_world = 1; other_world <= 8; ++other_world) {
      const std::size_t pair = turn++ * 7 % (all.size() * all.size());  // 7 and 25 have no common factor
      there_and_back(all[pair / all.size()], world, all[pair % all.size()], other_world);
    }
  }
}

TEST_CASE("Saved at N, loaded at M, saved at N, for all policies, precisions and worlds",
          "[checkpoint][host][law8][full]") {
  const std::vector<Kind> all = kinds();
  for (const Kind& one : all) {
    for (const Kind& other : all) {
      for (int world = 1; world <= 8; ++world) {
        for (int other_world = 1; other_world <= 8; ++other_world)
          there_and_back(one, world, other, other_world);
      }
    }
  }
}
