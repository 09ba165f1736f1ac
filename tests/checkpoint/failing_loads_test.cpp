// SPDX-License-Identifier: Apache-2.0
// Loads that fail on one rank behind the checks, or that ranks do not make together: every rank is told.
#include <sys/stat.h>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <support/scratch_files.hpp>
#include <support/small_checkpoint.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

using namespace test;

namespace {

/// Copies to the device that this rank's thread can still make; negative: any number.
thread_local int uploads_left = -1;

/// The host, with copies to device memory that fail.
class FailingHost : public so::Host {
 public:
  void upload(void* to, const void* from, std::int64_t bytes, Stream stream) const {
    if (uploads_left == 0) throw so::Error("the copy has failed");
    if (uploads_left > 0) --uploads_left;
    Host::upload(to, from, bytes, stream);
  }
};

/// Ranks that are threads, each with such a device.
class OverFailingHost : public HostThreads {
 public:
  using Device = FailingHost;
  explicit OverFailingHost(HostThreads comm) : HostThreads(std::move(comm)) {}
  [[nodiscard]] FailingHost device() const { return {}; }
};
static_assert(so::Collective<OverFailingHost>);

using FailingAdam = so::ZeroOptimizer<so::AdamW, so::FlatSharding, OverFailingHost, so::FullPrecision>;

}  // namespace

TEST_CASE("A load whose copies to the device fail on one rank breaks every rank's optimizer",
          "[checkpoint][host][law9]") {
  constexpr int world = 3;
  const int bad = GENERATE(0, 2);
  const int copies = GENERATE(0, 1);
  CAPTURE(bad, copies);
  DurableFiles files(small_checkpoints(2, checkpoint_table()));
  const auto seen = on_ranks(world, [&](HostThreads comm) {
    CheckpointEngine<FailingAdam> engine(OverFailingHost(std::move(comm)));
    const bool here = engine.optimizer.rank() == bad;
    if (here) uploads_left = copies;
    const std::string told =
        message_of<so::Error>([&] { ckpt::load(engine.optimizer, small_directory, {.files = &files}, {}); });
    uploads_left = -1;
    const std::string later = message_of<so::Error>([&] { engine.optimizer.zero_gradients({}); });
    return std::tuple(told, later);
  });
  for (const auto& [told, later] : seen) {
    CAPTURE(told, later);
    CHECK(told.find("the copy has failed") != std::string::npos);
    CHECK(told.find("rank " + std::to_string(bad)) != std::string::npos);
    CHECK(told.find("the optimizer is broken") != std::string::npos);
    CHECK(later == told);
  }
}

TEST_CASE("Paths may begin with any character", "[checkpoint][host]") {
  const std::filesystem::path odd = GENERATE("!runs/a", "+runs", "-", "!");
  CAPTURE(odd);
  DurableFiles files;
  const auto seen = on_ranks(2, [&](HostThreads comm) {
    AdamEngine engine(std::move(comm));
    engine.train(2);
    ckpt::save(engine.optimizer, odd, {.files = &files}, {});
    return ckpt::load(engine.optimizer, odd, {.files = &files}, {}).iteration;
  });
  for (const std::int64_t iteration : seen) CHECK(iteration == 2);
}

TEST_CASE("Links to generations count, names of directories do not, and a pipe is no file",
          "[checkpoint][host]") {
  const ScratchFolder folder;
  QuickFiles files;
  const auto runs = folder / "runs.safetensors";
  static_cast<void>(on_ranks(1, [&](HostThreads comm) {
    AdamEngine engine(std::move(comm));
    const auto load = [&](const std::filesystem::path& path) {
      return ckpt::load(engine.optimizer, path, {.files = &files}, {}).iteration;
    };
    for (int step = 0; step < 2; ++step) {
      engine.train(1);
      ckpt::save(engine.optimizer, runs, {.files = &files}, {});
    }
    CHECK(load(runs) == 2);
    std::filesystem::rename(runs / "generation-2-iteration-2", folder / "moved");
    std::filesystem::create_directory_symlink(folder / "moved", runs / "generation-2-iteration-2");
    CHECK(load(runs) == 2);
    ckpt::save(engine.optimizer, runs, {.keep = 1, .files = &files}, {});
    CHECK(names_in(runs) == std::vector<std::string>{"generation-3-iteration-2"});
    CHECK(std::filesystem::exists(folder / "moved"));
    ckpt::merge(ckpt::Checkpoint(ckpt::newest(runs)), folder / "m.safetensors");
    std::filesystem::rename(folder / "m.safetensors", folder / "m.other");
    CHECK(load(folder / "m.other") == 2);
    return 0;
  }));
  const auto pipe = folder / "pipe.safetensors";
  REQUIRE(::mkfifo(pipe.c_str(), 0666) == 0);
  CHECK(message_of<so::CheckpointError>([&] {
          static_cast<void>(ckpt::Checkpoint(pipe));
        }).find("is not a regular file") != std::string::npos);
}

TEST_CASE("A save into a generation, or below one, is refused", "[checkpoint][host]") {
  DurableFiles files;
  const auto seen = on_ranks(2, [&](HostThreads comm) {
    AdamEngine engine(std::move(comm));
    engine.train_and_save(1, files);
    const auto generation = ckpt::newest(run_directory, files);
    std::vector<std::string> told;
    for (const auto& path : {generation, generation / "sub"}) {
      told.push_back(message_of<so::CheckpointError>(
          [&] { ckpt::save(engine.optimizer, path, {.files = &files}, {}); }));
    }
    return told;
  });
  for (const auto& rank : seen) {
    for (const std::string& message : rank) CHECK(message.find("is a generation") != std::string::npos);
  }
}

TEST_CASE("A caller's mistake on any rank is told as such on every rank by save and load",
          "[checkpoint][host]") {
  const int bad = GENERATE(0, 2);
  CAPTURE(bad);
  DurableFiles files;
  const auto seen = on_ranks(3, [&](HostThreads comm) {
    AdamEngine engine(std::move(comm));
    const bool here = engine.optimizer.rank() == bad;
    ckpt::SaveOptions saving{.files = &files};
    std::vector<std::string> told;
    const auto save = [&] {
      told.push_back(message_of<std::invalid_argument>(
          [&] { ckpt::save(engine.optimizer, small_directory, saving, {}); }));
    };
    if (here) saving.keep = -1;
    save();
    saving = {.files = here ? nullptr : &files};
    save();
    const ckpt::LoadOptions loading{.files = here ? nullptr : &files};
    told.push_back(message_of<std::invalid_argument>(
        [&] { ckpt::load(engine.optimizer, small_directory, loading, {}); }));
    return told;
  });
  const std::string named[] = {"SaveOptions.keep", "SaveOptions.files", "LoadOptions.files"};
  for (const auto& told : seen) {
    CAPTURE(told);
    REQUIRE(told.size() == 3);
    for (std::size_t k = 0; k < 3; ++k) {
      CHECK(told[k].find(named[k]) != std::string::npos);
      CHECK(told[k].find("rank " + std::to_string(bad) + ": ") != std::string::npos);
    }
  }
  CHECK(files.operations().empty());
}
