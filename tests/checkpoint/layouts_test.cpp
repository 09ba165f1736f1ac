// SPDX-License-Identifier: Apache-2.0
// What users of such systems reported about how state is laid out in files, and what loading reads and takes.
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <support/checkpoint_engine.hpp>
#include <support/durable_files.hpp>
#include <support/scratch_files.hpp>
#include <support/watched_files.hpp>
#include <support/watched_new.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

using namespace test;

namespace {}  // namespace

TEMPLATE_TEST_CASE("Saved pieces cover every element once, and their bytes do not depend on ranks or buckets",
                   "[checkpoint][host][B004]", so::FlatSharding, so::PerParameterSharding, so::Replicated) {
  using Optimizer = ThreadsOptimizer<so::Adam, so::FullPrecision, TestType>;
  const std::int64_t unit = GENERATE(std::int64_t{1}, grain);  // cuts are at grains
  for (const std::int64_t n : {1, 10, 57, 1003}) {
    for (const int world : {1, 2, 3, 4, 7, 8}) {
      for (const std::int64_t bucket_grains : {1, 4, 8, 64}) {
        const std::int64_t numel = n * unit;
        CAPTURE(unit, n, world, bucket_grains);
        DurableFiles files;
        static_cast<void>(on_ranks(world, [&](HostThreads comm) {
          typename Optimizer::Config config;
          config.sharding.bucket_bytes = bucket_grains * grain * 4;
          Engine<Optimizer> engine(table_of_sizes({numel}), config, std::move(comm));
          ckpt::save(engine.optimizer, run_directory, {.files = &files}, {});
          return 0;
        }));
        const ckpt::Checkpoint saved(ckpt::newest(run_directory, files), files);
        std::vector<int> times(static_cast<std::size_t>(numel), 0);
        std::int64_t payload = 0;
        for (const auto& file : saved.manifest().files) {
          payload += ckpt::payload_bytes(saved.manifest(), file);
          for (const auto& piece : file.pieces) {
            REQUIRE(
                (0 <= piece.range.begin && piece.range.begin <= piece.range.end && piece.range.end <= numel));
            for (std::int64_t i = piece.range.begin; i < piece.range.end; ++i)
              ++times[static_cast<std::size_t>(i)];
          }
        }
        REQUIRE(std::count(times.begin(), times.end(), 1) == numel);
        REQUIRE(payload == 3 * 4 * numel);
        if (n == 57 && unit == grain && world == 2 && bucket_grains == 1 &&
            std::is_same_v<TestType, so::FlatSharding>) {
          CHECK(ckpt::elements_of(saved.manifest().files[0].pieces) == 29 * grain);
          CHECK(ckpt::elements_of(saved.manifest().files[1].pieces) == 28 * grain);
        }
      }
    }
  }
}

TEST_CASE("Every bucket and group comes back from where it belongs", "[checkpoint][host][B006]") {
  constexpr int world = 4;
  const std::int64_t buckets = GENERATE(1, 2, 3);
  const int loaded_by = GENERATE(1, 3, 4);
  CAPTURE(buckets, loaded_by);
  const auto table =
      packed_table({{"a", {5 * grain}, "A"}, {"b", {6 * grain}, "B"}, {"c", {7 * grain}, "C"}});
  ThreadsOptimizer<so::Adam>::Config config;
  config.groups = {{"A", {.lr = 0.1}}, {"B", {.lr = 0.2, .beta1 = 0.7}}, {"C", {.lr = 0.3}}};
  config.sharding.bucket_bytes = (buckets == 1 ? 20 : buckets == 2 ? 12 : 8) * grain * 4;
  const auto is_pattern = [](const std::vector<so::FullState>& states) {
    std::int64_t seen = 0;
    for (const auto& state : states) {
      const std::int64_t first = state.parameter == "a" ? 0 : state.parameter == "b" ? 5 * grain : 11 * grain;
      const float base = state.state == "exp_avg" ? 1000.0f : 2000.0f;
      for (std::size_t i = 0; state.state != "master" && i < state.values.size(); ++i)
        seen += state.values[i] == base + static_cast<float>(first + static_cast<std::int64_t>(i)) ? 1 : 0;
    }
    return seen;
  };
  DurableFiles files;
  const auto at_save = on_ranks(world, [&](HostThreads comm) {
    Engine<ThreadsOptimizer<so::Adam>> engine(table, config, std::move(comm));
    for (const auto& entry : engine.optimizer.table().entries()) {
      std::vector<float> m;
      std::vector<float> v;
      for (std::int64_t i = entry.offset; i < entry.offset + entry.numel; ++i) {
        m.push_back(1000.0f + static_cast<float>(i));
        v.push_back(2000.0f + static_cast<float>(i));
      }
      engine.optimizer.set_state(entry.name, "exp_avg", m, {});
      engine.optimizer.set_state(entry.name, "exp_avg_sq", v, {});
    }
    ckpt::save(engine.optimizer, run_directory, {.files = &files}, {});
    return is_pattern(engine.optimizer.gather_state(0, {}));
  });
  const auto at_load = on_ranks(loaded_by, [&](HostThreads comm) {
    Engine<ThreadsOptimizer<so::Adam>> engine(table, config, std::move(comm));
    ckpt::load(engine.optimizer, run_directory, {.files = &files}, {});
    return is_pattern(engine.optimizer.gather_state(0, {}));
  });
  CHECK(at_save[0] == 2 * 18 * grain);
  CHECK(at_load[0] == 2 * 18 * grain);
}

namespace {

/// What a rank saw of a load.
struct Load {
  std::int64_t read = 0;
  std::int64_t shard_files = 0;  ///< of which any byte was read
  std::int64_t shard_bytes = 0;  ///< of the states that it keeps
  std::int64_t above = 0;        ///< peak of what was allocated, over what is left when it was loaded
};

[[nodiscard]] std::vector<Load> loads(const std::filesystem::path& folder, int world, std::int64_t numel) {
  return on_ranks(world, [&](HostThreads comm) {
    using Optimizer = ThreadsOptimizer<so::Adam>;
    Load load;
    auto& allocations = allocations_here();
    allocations.begin();
    const auto engine =
        std::make_unique<Engine<Optimizer>>(table_of_sizes({numel}), Optimizer::Config(), std::move(comm));
    WatchedFiles files(ckpt::PosixFiles::instance());
    ckpt::load(engine->optimizer, folder, {.files = &files}, {});
    load.above = allocations.peak - allocations.live;
    for (const auto& [name, bytes] : files.bytes_read()) {
      load.read += bytes;
      load.shard_files += name.ends_with(".safetensors") ? 1 : 0;
    }
    load.shard_bytes = 3 * 4 * engine->optimizer.memory_plan().owned_parameters;
    return load;
  });
}

}  // namespace

TEST_CASE("A rank reads the files that hold what it keeps, and takes memory for that alone",
          "[checkpoint][host][B079]") {
  constexpr std::int64_t n = std::int64_t{1} << 20;
  const ScratchFolder folder;
  static_cast<void>(on_ranks(8, [&](HostThreads comm) {
    using Optimizer = ThreadsOptimizer<so::Adam>;
    Engine<Optimizer> engine(table_of_sizes({n}), Optimizer::Config(), std::move(comm));
    engine.fill_gradients(1);
    engine.step();
    ckpt::save(engine.optimizer, folder.path(), {}, {});
    return 0;
  }));
  constexpr std::int64_t block = std::int64_t{1} << 20;
  for (const Load& load : loads(folder.path(), 8, n)) {
    CHECK(static_cast<double>(load.read) <= 1.05 * static_cast<double>(load.shard_bytes) + 65536);
    CHECK(load.shard_files == 1);
    CHECK(load.shard_bytes == 12 * n / 8);
    CHECK(load.above <= load.shard_bytes + block + 65536);  // the block is what is being verified
  }
  for (const Load& load : loads(folder.path(), 4, n)) {
    CHECK(load.shard_files == 2);
    CHECK(static_cast<double>(load.read) <= 1.05 * static_cast<double>(load.shard_bytes) + 65536);
    CHECK(load.above <= load.shard_bytes + block + 65536);
  }
}

TEMPLATE_TEST_CASE("The states of a rank take twelve bytes an element that it keeps",
                   "[checkpoint][host][B079]", so::FullPrecision, (so::Mixed<so::bf16, float, float>)) {
  constexpr std::int64_t n = std::int64_t{1} << 20;
  using Optimizer = ThreadsOptimizer<so::Adam, TestType>;
  for (const int world : {1, 3, 8}) {
    const auto bytes = on_ranks(world, [&](HostThreads comm) {
      Engine<Optimizer> engine(table_of_sizes({n}), typename Optimizer::Config(), std::move(comm));
      std::int64_t sum = 0;
      for (const auto& run : engine.optimizer.states()) sum += run.range.size() * 4;
      return sum;
    });
    for (const std::int64_t rank : bytes) CHECK(rank <= 12 * ((n + world - 1) / world) + 12 * 512);
  }
}

TEST_CASE("Whatever a damaged file claims, loading it asks for at most twice its bytes",
          "[checkpoint][host][B085]") {
  const ScratchFolder folder;
  const auto table = table_of_sizes({40'000, 7});
  using Optimizer = ThreadsOptimizer<so::Adam>;
  static_cast<void>(on_ranks(3, [&](HostThreads comm) {
    Engine<Optimizer> engine(table, Optimizer::Config(), std::move(comm));
    ckpt::save(engine.optimizer, folder.path(), {}, {});
    return 0;
  }));
  DurableFiles files;
  const auto generation = ckpt::newest(folder.path());
  files.make_directory(generation);
  for (const auto& entry : std::filesystem::directory_iterator(generation)) {
    const auto text = ckpt::detail::read_text(ckpt::PosixFiles::instance(), entry.path());
    files.create(entry.path())->write_at(0, std::as_bytes(std::span(text)));
  }
  const auto path = generation / ckpt::shard_name({{"pp", 0, 1}}, 1, 3);
  const std::string whole = files.bytes(path);
  const std::size_t n = whole.size();
  REQUIRE(n > 100'000);
  std::vector<std::string> damaged;
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{1}, std::size_t{8}, std::size_t{100}, std::size_t{512}, n - 1})
    damaged.push_back(whole.substr(0, size));
  damaged.push_back(whole + "x");
  for (const int bit : {3, 60, 63}) {
    damaged.push_back(whole);
    damaged.back()[static_cast<std::size_t>(bit / 8)] ^= static_cast<char>(1 << (bit % 8));
  }
  damaged.push_back(whole);
  damaged.back()[20] ^= 1;
  damaged.back()[n - 20] ^= 1;
  for (const std::string& bytes : damaged) {
    files.bytes(path) = bytes;
    const auto largest = on_ranks(3, [&](HostThreads comm) -> std::int64_t {
      Engine<Optimizer> engine(table, Optimizer::Config(), std::move(comm));
      allocations_here().begin();
      const std::string message = message_of<so::CheckpointError>(
          [&] { ckpt::load(engine.optimizer, generation, {.files = &files}, {}); });
      const std::int64_t result = allocations_here().largest;
      return message.find(path.string()) == std::string::npos ? -1 : result;
    });
    for (const std::int64_t bytes_asked : largest) {
      CHECK(bytes_asked >= 0);
      CHECK(bytes_asked <= static_cast<std::int64_t>(2 * n));
    }
  }
}
