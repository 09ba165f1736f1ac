// SPDX-License-Identifier: Apache-2.0
#include <checkpoint_tools/saved.hpp>
#include <support/watched_new.hpp>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

using namespace test;
using Catch::Matchers::ContainsSubstring;
using checkpoint::Checkpoint;

namespace {

/// The numbers of a shard file, without its header.
std::string numbers_of(const std::filesystem::path& path) { return PlainFile(path).data; }

/// What differs between what reshard wrote and what the other world saved itself: nothing, but for the id.
std::string difference(const std::filesystem::path& resharded, const std::filesystem::path& saved) {
  checkpoint::Manifest a = Checkpoint(resharded).manifest();
  checkpoint::Manifest b = Checkpoint(saved).manifest();
  if (a.files.size() != b.files.size()) return "number of files";
  for (std::size_t k = 0; k < a.files.size(); ++k) {
    if (a.files[k].name != b.files[k].name) return "name " + a.files[k].name;
    if (a.files[k].bytes != b.files[k].bytes) return "size of " + a.files[k].name;
    if (a.files[k].pieces != b.files[k].pieces) return "pieces of " + a.files[k].name;
    if (numbers_of(resharded / a.files[k].name) != numbers_of(saved / b.files[k].name))
      return "numbers of " + a.files[k].name;
  }
  a.files = b.files;
  a.id = b.id;
  a.sequence = b.sequence;
  return a == b ? "" : "the manifests";
}

template <class Sharding>
void require_same_as_saved(int from, int to, std::int64_t bucket_bytes) {
  CAPTURE(Sharding::name, from, to, bucket_bytes);
  const ScratchFolder folder;
  const auto source = save_numbers(folder / "source", from, awkward_tensors(), 2048);
  const auto expected =
      save_numbers<so::FullPrecision, Sharding>(folder / "expected", to, awkward_tensors(), bucket_bytes);
  const auto report = checkpoint::reshard(
      Checkpoint(source), folder / "resharded",
      {.world = to, .sharding = std::string(Sharding::name), .bucket_bytes = bucket_bytes});
  CHECK(difference(report.generation, expected) == "");
  CHECK(report.bytes == checkpoint::total_bytes(Checkpoint(report.generation).manifest()));
  CHECK(checkpoint::verify(Checkpoint(report.generation)).empty());
  CHECK(names_in(folder / "resharded") == std::vector<std::string>{report.generation.filename()});
}

}  // namespace

TEST_CASE("what reshard writes is what the other world would have saved", "[checkpoint][host]") {
  const int from = GENERATE(1, 3, 4);
  const int to = GENERATE(1, 2, 5, 20);
  const std::int64_t bucket_bytes = GENERATE(4, 5000, 1 << 25);
  require_same_as_saved<so::FlatSharding>(from, to, bucket_bytes);
  require_same_as_saved<so::PerParameterSharding>(from, to, bucket_bytes);
  require_same_as_saved<so::Replicated>(from, to, bucket_bytes);
}

TEST_CASE("a merged file is resharded like the generation it came from", "[checkpoint][host]") {
  const ScratchFolder folder;
  const auto source = save_numbers(folder / "source", 3, awkward_tensors());
  checkpoint::merge(Checkpoint(source), folder / "merged.safetensors");
  const auto report = checkpoint::reshard(Checkpoint(folder / "merged.safetensors"), folder / "resharded",
                                          {.world = 3, .bucket_bytes = 4096});
  CHECK(difference(report.generation, source) == "");
  CHECK(wrong_after_load(report.generation, 2, awkward_tensors()) == "");
}

TEST_CASE("ranks of the other world read only their own files", "[checkpoint][host]") {
  const int world = GENERATE(2, 5);
  CAPTURE(world);
  const ScratchFolder folder;
  const auto source = save_numbers(folder / "source", 3, awkward_tensors());
  const auto report =
      checkpoint::reshard(Checkpoint(source), folder / "resharded", {.world = world, .bucket_bytes = 4096});
  using Optimizer = ThreadsOptimizer<so::AdamW>;
  const so::ParameterTable table = packed_table(awkward_tensors());
  const auto opened = on_ranks(world, [&](HostThreads comm) {
    Engine<Optimizer> engine(table, two_groups<Optimizer>(4096), std::move(comm));
    QuickFiles quick;
    WatchedFiles files(quick);
    checkpoint::load(engine.optimizer, report.generation, {.files = &files}, {});
    std::string text;
    for (const auto& [name, bytes] : files.bytes_read()) {
      if (name != checkpoint::manifest_name) text += name + " ";
    }
    return text;
  });
  for (int rank = 0; rank < world; ++rank) {
    CHECK(opened[static_cast<std::size_t>(rank)] ==
          checkpoint::shard_name({{"pp", 0, 1}}, rank, world) + " ");
  }
}

TEST_CASE("reshard adds a generation, and the one before it stays", "[checkpoint][host]") {
  const ScratchFolder folder;
  const auto source = save_numbers(folder.path(), 2, awkward_tensors());
  const auto report = checkpoint::reshard(Checkpoint(source), folder.path(), {.world = 5});
  CHECK(report.generation.filename() == "generation-2-iteration-20");
  CHECK(checkpoint::newest(folder.path()) == report.generation);
  CHECK(checkpoint::verify(Checkpoint(source)).empty());
  CHECK(Checkpoint(report.generation).manifest().id != Checkpoint(source).manifest().id);
}

TEST_CASE("texts of single ranks are kept where the world stays, and reported where not",
          "[checkpoint][host]") {
  const ScratchFolder folder;
  checkpoint::SaveOptions options;
  options.rank_extra = "random ";
  const auto source = save_numbers(folder / "source", 2, awkward_tensors(), 4096, number, 20, options);
  const auto same = checkpoint::reshard(Checkpoint(source), folder / "same", {.world = 2});
  CHECK(same.notes.empty());
  CHECK(Checkpoint(same.generation).manifest().files[1].extra == "random 1");
  const auto other = checkpoint::reshard(Checkpoint(source), folder / "other", {.world = 3});
  REQUIRE(other.notes.size() == 1);
  CHECK_THAT(other.notes[0], ContainsSubstring("2 ranks"));
}

TEST_CASE("reshard refuses what it cannot do, and says what it can", "[checkpoint][host]") {
  const ScratchFolder folder;
  const auto generation = save_numbers(folder / "source", 2, awkward_tensors());
  const Checkpoint source(generation);
  const auto refusal = [&](const checkpoint::ReshardOptions& options) {
    return message_of<std::invalid_argument>(
        [&] { checkpoint::reshard(source, folder / "resharded", options); });
  };
  CHECK_THAT(refusal({.world = 0}), ContainsSubstring("world must be from 1 to 1000000, got 0"));
  CHECK_THAT(refusal({.world = 1'000'001}), ContainsSubstring("1 to 1000000, got 1000001"));
  CHECK_THAT(refusal({.world = 2, .sharding = "mine"}),
             ContainsSubstring("'mine'") && ContainsSubstring("'flat', 'per-parameter' and 'replicated'"));
  CHECK_THAT(refusal({.world = 2, .bucket_bytes = 0}), ContainsSubstring("bucket_bytes must be at least 1"));
  CHECK_THAT(message_of<so::CheckpointError>([&] { checkpoint::reshard(source, generation, {.world = 2}); }),
             ContainsSubstring("is a generation"));
  CHECK(names_in(folder.path()) == std::vector<std::string>{"source"});
}

TEST_CASE("resharding a damaged checkpoint names the file and leaves nothing", "[checkpoint][host]") {
  const ScratchFolder folder;
  const auto source = save_numbers(folder / "source", 2, awkward_tensors());
  damage(source / "optimizer_pp-0-of-1_dp-1-of-2.safetensors", 9);
  CHECK_THAT(message_of<so::CheckpointError>(
                 [&] { checkpoint::reshard(Checkpoint(source), folder / "resharded", {.world = 3}); }),
             ContainsSubstring("dp-1-of-2.safetensors") && ContainsSubstring("is damaged"));
  CHECK(names_in(folder / "resharded").empty());
}

TEST_CASE("a resharding that fails anywhere leaves the generations as they were", "[checkpoint][host]") {
  const ScratchFolder folder;
  const auto source = save_numbers(folder / "source", 2, {{"p", {300}}, {"q", {5}}});
  QuickFiles quick;
  WatchedFiles counted(quick);
  std::filesystem::create_directory(folder / "counted");  // as the one below is there
  checkpoint::reshard(Checkpoint(source), folder / "counted", {.world = 3, .files = &counted});
  const auto kept = save_numbers(folder / "kept", 1, awkward_tensors());
  REQUIRE(counted.calls() > 15);
  for (std::int64_t k = 1; k < counted.calls(); ++k) {  // the last syncs the directory: after the rename
    CAPTURE(k);
    WatchedFiles files(quick);
    files.fail_at = k;
    REQUIRE_THAT(message_of<so::CheckpointError>([&] {
                   checkpoint::reshard(Checkpoint(source), folder / "kept", {.world = 3, .files = &files});
                 }),
                 ContainsSubstring(files.reason));
    REQUIRE(checkpoint::newest(folder / "kept") == kept);
    REQUIRE(names_in(folder / "kept").size() == 1);
  }
  WatchedFiles files(quick);
  files.fail_at = counted.calls();
  CHECK_THAT(message_of<so::CheckpointError>([&] {
               checkpoint::reshard(Checkpoint(source), folder / "kept", {.world = 3, .files = &files});
             }),
             ContainsSubstring(files.reason));
  CHECK(checkpoint::newest(folder / "kept") != kept);
  CHECK(checkpoint::verify(Checkpoint(checkpoint::newest(folder / "kept"))).empty());
}

TEST_CASE("a world of more ranks than files can be open at a time is resharded", "[checkpoint][host]") {
  const ScratchFolder folder;
  const std::vector<Packed> tensors{{"a", {70'001}}, {"b", {100'003}}};
  const auto source = save_numbers(folder / "source", 2, tensors, 1 << 18);
  const auto many =
      checkpoint::reshard(Checkpoint(source), folder / "many", {.world = 600, .bucket_bytes = 1});
  CHECK(Checkpoint(many.generation).manifest().files.size() == 600);
  CHECK(checkpoint::verify(Checkpoint(many.generation)).empty());
  const auto back = checkpoint::reshard(Checkpoint(many.generation), folder / "back",
                                        {.world = 2, .bucket_bytes = 1 << 18});
  CHECK(difference(back.generation, source) == "");
}

TEST_CASE("a resharding holds a few megabytes, whatever the size", "[checkpoint][host]") {
  const ScratchFolder folder;
  const std::vector<Packed> tensors{{"a", {1'500'000}}, {"b", {1'300'003}}, {"c", {0}}};
  const auto source = save_numbers(folder / "saved", 3, tensors, 1 << 20);
  std::int64_t done = 0;
  std::int64_t total = 0;
  Allocations& memory = allocations_here();
  const std::int64_t before = memory.live;
  memory.begin();
  const auto report = checkpoint::reshard(
      Checkpoint(source), folder / "resharded",
      {.world = 7, .bucket_bytes = 1 << 20, .progress = [&](std::int64_t now, std::int64_t of) {
         done = now;
         total = of;
       }});
  CHECK(report.bytes > 32'000'000);
  CHECK(memory.peak - before < 4'000'000);
  CHECK(done == total);
}
