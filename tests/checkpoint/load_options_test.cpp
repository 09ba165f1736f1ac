// SPDX-License-Identifier: Apache-2.0
// What LoadOptions let through, and what not.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <support/checkpoint_engine.hpp>
#include <support/durable_files.hpp>

#include <algorithm>
#include <filesystem>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

using namespace test;

namespace {

using L2Engine = CheckpointEngine<ThreadsOptimizer<so::Adam>>;

[[nodiscard]] bool any_holds(const std::vector<std::string>& texts, const std::string& part) {
  return std::any_of(texts.begin(), texts.end(),
                     [&](const std::string& text) { return text.find(part) != std::string::npos; });
}

}  // namespace

TEST_CASE("A lenient load of another rule's checkpoint takes the parameters alone, and says so",
          "[checkpoint][host]") {
  const int world = GENERATE(1, 3);
  CAPTURE(world);
  DurableFiles files;
  const auto saved = on_ranks(2, [&](HostThreads comm) {
    L2Engine engine(std::move(comm));
    engine.train_and_save(5, files);
    return engine.values();
  });
  const auto loaded = on_ranks(world, [&](HostThreads comm) {
    AdamEngine engine(std::move(comm));
    const double lr = engine.optimizer.rule("plain").lr;
    const auto moments = [&] { return std::pair(engine.state("exp_avg"), engine.state("exp_avg_sq")); };
    const auto before = moments();
    const auto report = ckpt::load(engine.optimizer, run_directory, {.lenient = true, .files = &files}, {});
    const bool stay = moments() == before && engine.optimizer.counters({}).updates == 0 &&
                      engine.optimizer.rule("plain").lr == lr;
    return std::tuple(engine.values(), stay ? 1 : 0, report.notes);
  });
  for (const auto& [values, stay, notes] : loaded) {
    // The frozen one has no state: it stays as it stands.
    CHECK(values == saved.front());
    CHECK(stay == 1);
    CHECK(any_holds(notes, "states, counters and hyper-parameters stay"));
  }
}

TEST_CASE("Ranks that load with different options all get an error that names it, and nothing changes",
          "[checkpoint][host]") {
  const std::string option = GENERATE("weights_only", "keep_hyper_parameters", "lenient");
  const int other = GENERATE(0, 2);
  CAPTURE(option, other);
  DurableFiles files;
  const auto seen = on_ranks(3, [&](HostThreads comm) {
    L2Engine engine(std::move(comm));
    engine.train_and_save(2, files);
    engine.train(1);
    const Snapshot before = engine.own_snapshot();
    const bool here = engine.optimizer.rank() == other;
    const ckpt::LoadOptions options{.weights_only = here && option == "weights_only",
                                    .keep_hyper_parameters = here && option == "keep_hyper_parameters",
                                    .lenient = here && option == "lenient",
                                    .files = &files};
    const std::string message =
        message_of<so::CheckpointError>([&] { ckpt::load(engine.optimizer, run_directory, options, {}); });
    return std::tuple(message, engine.own_snapshot() == before ? 1 : 0);
  });
  for (const auto& [message, unchanged] : seen) {
    CAPTURE(message);
    CHECK(message.find("ranks disagree: rank 0 has " + option) != std::string::npos);
    CHECK(message.find("rank " + std::to_string(other == 0 ? 1 : 2) + " has " + option) != std::string::npos);
    CHECK(unchanged == 1);
  }
}

TEST_CASE("Another pipeline stage's checkpoint is refused where the stage is given, and told where it is not",
          "[checkpoint][host]") {
  const std::vector<ckpt::Coordinate> stage{{"pp", 1, 2}, {"tp", 0, 4}};
  DurableFiles files;
  const auto seen = on_ranks(2, [&](HostThreads comm) {
    L2Engine engine(std::move(comm));
    engine.train_and_save(1, files, {.coordinates = stage});
    engine.train(1);
    const Snapshot before = engine.own_snapshot();
    ckpt::LoadOptions options{.coordinates = std::vector<ckpt::Coordinate>{{"pp", 0, 2}, {"tp", 0, 4}},
                              .files = &files};
    const std::string message =
        message_of<so::CheckpointError>([&] { ckpt::load(engine.optimizer, run_directory, options, {}); });
    const bool unchanged = engine.own_snapshot() == before;
    options.lenient = true;
    const std::string lenient =
        message_of<so::CheckpointError>([&] { ckpt::load(engine.optimizer, run_directory, options, {}); });
    const ckpt::LoadOptions right{.coordinates = stage, .files = &files};
    const auto told = ckpt::load(engine.optimizer, run_directory, right, {}).coordinates;
    const auto any = ckpt::load(engine.optimizer, run_directory, {.files = &files}, {}).coordinates;
    return std::tuple(message, unchanged ? 1 : 0, lenient, told == stage && any == stage ? 1 : 0);
  });
  const std::string difference = "LoadOptions.coordinates: pp 1 of 2, tp 0 of 4, not pp 0 of 2, tp 0 of 4";
  for (const auto& [message, unchanged, lenient, told] : seen) {
    CAPTURE(message, lenient);
    CHECK(message.find(difference) != std::string::npos);
    CHECK(unchanged == 1);
    CHECK(lenient.find(difference) != std::string::npos);
    CHECK(told == 1);
  }
}
