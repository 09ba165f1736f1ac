// SPDX-License-Identifier: Apache-2.0
// Damaged, cut, padded, missing and exchanged files: load names the file and changes nothing.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <support/small_checkpoint.hpp>
#include <support/watched_files.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

using namespace test;

namespace {

using Files = DurableFiles;
using SoloEngine = CheckpointEngine<SoloAdam>;

[[nodiscard]] SoloEngine solo_engine() {
  return SoloEngine(small_table(), checkpoint_config<SoloAdam>(), so::Solo<so::Host>());
}

[[nodiscard]] std::filesystem::path newest_of(const Files& files) {
  return ckpt::generations(small_directory, files).back().path;
}

/// Flips each `stride`th bit of the newest generation, loads, and says what was not refused as it should be.
[[nodiscard]] std::string unseen_flips(Files& files, std::size_t first, std::size_t stride) {
  SoloEngine engine = solo_engine();
  engine.train(1);
  const Snapshot before = engine.own_snapshot();
  const auto generation = newest_of(files);
  for (const auto& path : files.all_files(generation)) {
    std::string& bytes = files.bytes(path);
    for (std::size_t bit = first; bit < bytes.size() * 8; bit += stride) {
      const auto mask = static_cast<char>(1U << (bit % 8));
      bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ mask);
      // The folder itself: there is no other generation to look for.
      const std::string message = message_of<so::CheckpointError>(
          [&] { ckpt::load(engine.optimizer, generation, {.files = &files}, {}); });
      bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ mask);
      const bool named = message.find(path.string()) != std::string::npos;
      if (named && engine.own_snapshot() == before) continue;
      return "bit " + std::to_string(bit) + " of " + path.string() + ": " +
             (message.empty() ? "loaded"
              : named         ? "something changed"
                              : message);
    }
  }
  ckpt::load(engine.optimizer, generation, {.files = &files}, {});
  return engine.own_snapshot() == before ? "whole, and nothing was loaded" : "";
}

/// What a rank saw of a load that must be refused.
struct Refusal {
  std::string message;
  std::string alternative;
  bool unchanged = false;
  std::int64_t alternative_iteration = 0;  ///< of a load of that
};

/// Damages two whole generations, and loads the newest on several ranks.
[[nodiscard]] std::vector<Refusal> refusals(int saved_by, int world,
                                            const std::function<void(Files&)>& damage,
                                            const so::ParameterTable& table = small_table()) {
  Files files(small_checkpoints(saved_by, table));
  damage(files);
  return on_ranks(world, [&](HostThreads comm) {
    CheckpointEngine<CheckpointAdam> engine(table, checkpoint_config<CheckpointAdam>(), std::move(comm));
    engine.train(1);
    const Snapshot before = engine.own_snapshot();
    Refusal refusal;
    try {
      ckpt::load(engine.optimizer, small_directory, {.files = &files}, {});
    } catch (const so::CheckpointError& error) {
      refusal.message = error.what();
      refusal.alternative = error.alternative().string();
    }
    refusal.unchanged = engine.own_snapshot() == before;
    if (!refusal.alternative.empty()) {
      refusal.alternative_iteration =
          ckpt::load(engine.optimizer, refusal.alternative, {.files = &files}, {}).iteration;
    }
    return refusal;
  });
}

void check(const std::vector<Refusal>& ranks, const std::string& named) {
  for (const Refusal& rank : ranks) {
    CAPTURE(rank.message);
    CHECK(rank.message.find(named) != std::string::npos);
    CHECK(rank.message.find("is whole: load that") != std::string::npos);
    CHECK(rank.alternative == (small_directory / "generation-1-iteration-2").string());
    CHECK(rank.alternative_iteration == 2);
    CHECK(rank.unchanged);
  }
}

/// The length of a header as the file gives it, with the 8 bytes of the length.
[[nodiscard]] std::size_t header_end(const std::string& bytes) {
  std::size_t length = 0;
  for (std::size_t k = 8; k-- > 0;) length = length << 8 | static_cast<unsigned char>(bytes[k]);
  return 8 + length;
}

}  // namespace

TEST_CASE("Every single bit that flips in a checkpoint is seen by load, which names the file",
          "[checkpoint][host][law8][B085]") {
  const int world = GENERATE(1, 2, 3);
  CAPTURE(world);
  Files files(small_checkpoints(world));
  // All bits of the checkpoint of two ranks; of the others each seventh. A sanitizer watches a part: it is
  // slow.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  CHECK(unseen_flips(files, 0, 101) == "");
#else
  CHECK(unseen_flips(files, 0, world == 2 ? 1 : 7) == "");
#endif
}

TEST_CASE("A flipped bit is told to every rank, with the generation that is whole",
          "[checkpoint][host][law8]") {
  const int saved_by = GENERATE(1, 3);
  const int world = GENERATE(1, 3, 4);
  CAPTURE(saved_by, world);
  const Files whole(small_checkpoints(saved_by));
  for (const auto& path : whole.all_files(newest_of(whole))) {
    for (const int where : {0, 9, 40, 77, 99}) {
      CAPTURE(path.string(), where);
      const auto ranks = refusals(saved_by, world, [&](Files& files) {
        std::string& bytes = files.bytes(path);
        const std::size_t at = (bytes.size() - 1) * static_cast<std::size_t>(where) / 99;
        bytes[at] = static_cast<char>(bytes[at] ^ 0x10);
      });
      check(ranks, path.string());
    }
  }
}

TEST_CASE("A failure that is no damage offers no older generation", "[checkpoint][host]") {
  constexpr int world = 3;
  const int bad = GENERATE(0, 1, 2);
  const int kind = GENERATE(0, 1, 2, 3);
  CAPTURE(bad, kind);
  Files disk(small_checkpoints(2, checkpoint_table()));
  const auto seen = on_ranks(world, [&](HostThreads comm) {
    CheckpointEngine<CheckpointAdam> engine(std::move(comm));
    engine.train(1);
    const bool here = engine.optimizer.rank() == bad;
    WatchedFiles files(disk);
    bool failed = false;
    files.before = [&](const std::string& call, const std::filesystem::path& path) {
      if (!here || failed || call != "open" || path.extension() != ".safetensors") return;
      if (kind == 3 && path.parent_path() == newest_of(disk))  // and whenever it is tried again
        throw so::FileError("shardopt: open: Permission denied",
                            std::make_error_code(std::errc::permission_denied));
      failed = true;
      if (kind == 0) throw std::bad_alloc();
      if (kind == 1) throw so::CheckpointError("shardopt: open: Input/output error");  // for the moment
    };
    if (kind == 2) static_cast<void>(engine.optimizer.reduce({}, {}));
    std::pair<std::string, std::string> told;
    try {
      ckpt::load(engine.optimizer, small_directory, {.files = &files}, {});
    } catch (const so::CheckpointError& error) {
      told = {error.what(), error.alternative().string()};
    } catch (const std::logic_error& error) {
      told.first = error.what();
    }
    return std::tuple(told.first, told.second, files.bytes_read().empty() ? 1 : 0);
  });
  for (const auto& [message, alternative, untouched] : seen) {
    CAPTURE(message);
    CHECK(message.find(kind == 2 ? "in the middle of a step" : "a checkpoint was not loaded") !=
          std::string::npos);
    CHECK(message.find("is whole") == std::string::npos);
    CHECK(alternative == "");
    if (kind == 2) CHECK(untouched == 1);
  }
}

TEST_CASE("Cut, padded and missing files of tensors are refused by name on all ranks, and nothing changes",
          "[checkpoint][host][law8][B085]") {
  constexpr int saved_by = 3;
  const int world = GENERATE(1, 2, 3);
  const int shard = GENERATE(0, 2);
  const auto table = checkpoint_table();
  Files whole(small_checkpoints(saved_by, table));
  const auto path = newest_of(whole) / ckpt::shard_name({{"pp", 0, 1}}, shard, saved_by);
  const std::string bytes = whole.bytes(path);
  const std::size_t header = header_end(bytes);
  REQUIRE(header % 64 == 0);
  REQUIRE(header < bytes.size());
  const auto refused = [&](const std::function<void(Files&)>& damage) {
    check(refusals(saved_by, world, damage, table), path.string());
  };
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{1}, std::size_t{8}, header - 1, header, bytes.size() - 1}) {
    CAPTURE(world, shard, size);
    refused([&](Files& files) { files.bytes(path).resize(size); });
  }
  CAPTURE(world, shard);
  refused([&](Files& files) { files.bytes(path) += 'x'; });
  refused([&](Files& files) { files.bytes(path).replace(0, 8, std::string("\0\0\0\0\0\0\0\x80", 8)); });
  refused([&](Files& files) { files.remove(path); });
}

TEST_CASE("Cut, padded and missing manifests are refused by name on all ranks, and nothing changes",
          "[checkpoint][host][law8][B085]") {
  const int world = GENERATE(1, 3);
  Files whole(small_checkpoints(2));
  const auto path = newest_of(whole) / ckpt::manifest_name;
  const std::size_t n = whole.bytes(path).size();
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{8}, n / 2, n - 1}) {
    CAPTURE(world, size);
    check(refusals(2, world, [&](Files& files) { files.bytes(path).resize(size); }), path.string());
  }
  check(refusals(2, world, [&](Files& files) { files.bytes(path) += '\n'; }), path.string());
  check(refusals(2, world, [&](Files& files) { files.remove(path); }), path.string());
}

TEST_CASE("Files of another generation are refused, beside the right ones or in their place",
          "[checkpoint][host][law8][B085]") {
  const int world = GENERATE(1, 3);
  const std::string shard = ckpt::shard_name({{"pp", 0, 1}}, 1, 3);
  const auto old = small_directory / "generation-1-iteration-2";
  const Files whole(small_checkpoints(3));
  const auto newest = newest_of(whole);
  SECTION("exchanged") {
    const auto ranks = refusals(
        3, world, [&](Files& files) { std::swap(files.bytes(old / shard), files.bytes(newest / shard)); });
    for (const Refusal& rank : ranks) {
      CAPTURE(rank.message);
      CHECK(rank.message.find((newest / shard).string()) != std::string::npos);
      CHECK(rank.message.find("is a file of another generation") != std::string::npos);
      CHECK(rank.alternative == "");  // the other one has the wrong file, too
      CHECK(rank.unchanged);
    }
  }
  SECTION("in the place of the right one") {
    check(refusals(3, world, [&](Files& files) { files.bytes(newest / shard) = files.bytes(old / shard); }),
          (newest / shard).string());
  }
  SECTION("left over from a save by more ranks") {
    const std::string stranger = ckpt::shard_name({{"pp", 0, 1}}, 3, 4);
    check(refusals(3, world,
                   [&](Files& files) {
                     const auto file = files.create(newest / stranger);
                     file->write_at(0, std::as_bytes(std::span(files.bytes(old / shard))));
                   }),
          stranger);
  }
  SECTION("the manifest of another generation") {
    check(refusals(3, world,
                   [&](Files& files) {
                     files.bytes(newest / ckpt::manifest_name) = files.bytes(old / ckpt::manifest_name);
                   }),
          newest.string());
  }
}

TEST_CASE("A checkpoint without any element, and ranks without a share, save and load",
          "[checkpoint][host][B085]") {
  const bool empty = GENERATE(true, false);
  const int saved_by = GENERATE(1, 3);
  const int world = GENERATE(1, 2, 3);
  CAPTURE(empty, saved_by, world);
  const so::ParameterTable table = packed_table({{"p", {empty ? 0 : 1, 1}, "plain"}});
  Files files(small_checkpoints(saved_by, table));
  const auto loaded = on_ranks(world, [&](HostThreads comm) {
    CheckpointEngine<CheckpointAdam> engine(table, checkpoint_config<CheckpointAdam>(), std::move(comm));
    const auto report = ckpt::load(engine.optimizer, small_directory, {.files = &files}, {});
    return report.iteration;
  });
  for (const std::int64_t iteration : loaded) CHECK(iteration == 4);
  CHECK(ckpt::verify(ckpt::Checkpoint(newest_of(files), files)).empty());
}

TEST_CASE("Manifests of coordinates that no file can be named by are refused", "[checkpoint][host]") {
  Files files(small_checkpoints(2, checkpoint_table()));
  const auto generation = newest_of(files);
  const ckpt::Manifest whole = ckpt::Checkpoint(generation, files).manifest();
  for (const std::vector<ckpt::Coordinate>& coordinates :
       {std::vector<ckpt::Coordinate>{{"pp", 1, 1}}, std::vector<ckpt::Coordinate>{{"a/../../b", 0, 1}},
        std::vector<ckpt::Coordinate>{{"pp", 0, 2}, {"pp", 1, 2}},
        std::vector<ckpt::Coordinate>{{"dp", 0, 1}}}) {
    ckpt::Manifest manifest = whole;
    manifest.coordinates = coordinates;
    files.bytes(generation / ckpt::manifest_name) = ckpt::to_text(manifest);
    CHECK(message_of<so::CheckpointError>([&] {
            static_cast<void>(ckpt::Checkpoint(generation, files));
          }).find("has coordinates that no file can be named by") != std::string::npos);
  }
}

TEST_CASE("Manifests that do not give every element to one file are refused, whatever their checksum",
          "[checkpoint][host][law8]") {
  Files files(small_checkpoints(3, checkpoint_table()));
  const auto generation = newest_of(files);
  const auto path = generation / ckpt::manifest_name;
  const ckpt::Manifest whole = ckpt::Checkpoint(generation, files).manifest();
  SoloEngine engine(checkpoint_table(), checkpoint_config<SoloAdam>(), so::Solo<so::Host>());
  engine.train(1);
  const Snapshot before = engine.own_snapshot();
  const auto refused = [&](const ckpt::Manifest& manifest) {
    files.bytes(path) = ckpt::to_text(manifest);
    const std::string message = message_of<so::CheckpointError>(
        [&] { ckpt::load(engine.optimizer, generation, {.files = &files}, {}); });
    if (message.find(generation.string()) == std::string::npos) return "loaded, or no name in: " + message;
    return engine.own_snapshot() == before ? std::string() : "refused, and changed";
  };
  for (std::size_t f = 0; f < 3; ++f) {
    REQUIRE(!whole.files[f].pieces.empty());
    for (std::size_t p = 0; p < whole.files[f].pieces.size(); ++p) {
      const auto changed = [&](std::int64_t parameter, std::int64_t begin, std::int64_t end) {
        ckpt::Manifest m = whole;
        auto& piece = m.files[f].pieces[p];
        piece = {piece.parameter + parameter, {piece.range.begin + begin, piece.range.end + end}};
        return refused(m);
      };
      CAPTURE(f, p);
      for (const std::int64_t by :
           {std::int64_t{-1}, std::int64_t{1}, std::int64_t{1} << 40, std::int64_t{1} << 62}) {
        CAPTURE(by);
        CHECK(changed(0, by, 0) == "");
        CHECK(changed(0, 0, by) == "");
        CHECK(changed(0, by, by) == "");  // as many as before: only the cover shows it
        CHECK(changed(by, 0, 0) == "");
      }
      ckpt::Manifest m = whole;
      m.files[f].pieces.push_back(whole.files[f].pieces[p]);
      CHECK(refused(m) == "");
      m = whole;
      m.files[f].pieces.erase(m.files[f].pieces.begin() + static_cast<std::ptrdiff_t>(p));
      CHECK(refused(m) == "");
    }
  }
}
