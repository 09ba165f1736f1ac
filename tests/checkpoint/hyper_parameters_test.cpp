// SPDX-License-Identifier: Apache-2.0
// Hyper-parameters of every kind in manifests: what comes back, and what a rule cannot take.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <support/checkpoint_engine.hpp>
#include <support/durable_files.hpp>

#include <array>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

using namespace test;

namespace {

enum class Mode : std::uint8_t { plain, fancy = 200 };
enum class Side : bool { left, right };
enum class Letter : char { a = 'a', z = 'z' };

/// A rule of the user's with fields of many types, and no opinion about their values.
struct ManyFields {
  double lr = 0.1;
  float bound = std::numeric_limits<float>::infinity();
  double lowest = -std::numeric_limits<double>::infinity();
  double unknown = 0;
  bool on = false;
  std::int16_t small = 0;
  Mode mode = Mode::plain;
  Side side = Side::left;
  Letter letter = Letter::a;
  std::uint64_t seed = 0;

  static constexpr std::array<std::string_view, 10> hyper_parameter_names{
      "lr", "bound", "lowest", "unknown", "on", "small", "mode", "side", "letter", "seed"};

  template <class V>
  struct State {
    V visits;
  };
  struct Constants {
    float lr;
  };
  [[nodiscard]] SHARDOPT_HD Constants constants(so::StepScalars) const { return {static_cast<float>(lr)}; }
  template <class V>
  [[nodiscard]] SHARDOPT_RULE static V update(Constants c, V param, V grad, State<V>& state) {
    state.visits = so::math::add(state.visits, V(1.0f));
    return so::math::fma(so::math::neg(c.lr), grad, param);
  }
};
static_assert(so::OptimizerRule<ManyFields>);

/// Saves with one rule, lets `change` at the manifest, and loads into the rule's defaults.
template <class Change>
[[nodiscard]] ManyFields reloaded(const ManyFields& rule, const Change& change) {
  using Optimizer = ThreadsOptimizer<ManyFields>;
  DurableFiles files;
  return on_ranks(1,
                  [&](HostThreads comm) {
                    Optimizer::Config config{.groups = {{"default", rule}}};
                    {
                      Engine<Optimizer> engine(table_of_sizes({300}), config, comm.borrow());
                      ckpt::save(engine.optimizer, run_directory, {.files = &files}, {});
                    }
                    const auto generation = ckpt::newest(run_directory, files);
                    ckpt::Manifest manifest = ckpt::Checkpoint(generation, files).manifest();
                    for (auto& [name, value] : manifest.groups[0].hyper_parameters) change(name, value);
                    files.bytes(generation / ckpt::manifest_name) = ckpt::to_text(manifest);
                    config.groups[0].rule = ManyFields();
                    Engine<Optimizer> engine(table_of_sizes({300}), config, std::move(comm));
                    ckpt::load(engine.optimizer, run_directory, {.files = &files}, {});
                    return engine.optimizer.rule("default");
                  })
      .front();
}

}  // namespace

TEST_CASE("Hyper-parameters of every type come back, those that are not finite too", "[checkpoint][host]") {
  const ManyFields saved{.lr = 1.0 / 3,
                         .bound = -std::numeric_limits<float>::infinity(),
                         .lowest = std::numeric_limits<double>::denorm_min(),
                         .unknown = std::numeric_limits<double>::quiet_NaN(),
                         .on = true,
                         .small = -32768,
                         .mode = Mode::fancy,
                         .side = Side::right,
                         .letter = Letter::z,
                         .seed = (std::uint64_t{1} << 63) - 1};
  const ManyFields loaded = reloaded(saved, [](const std::string&, ckpt::HyperParameter&) {});
  CHECK(loaded.lr == saved.lr);
  CHECK(loaded.bound == saved.bound);
  CHECK(loaded.lowest == saved.lowest);
  CHECK(std::isnan(loaded.unknown));
  CHECK(loaded.on);
  CHECK(loaded.small == -32768);
  CHECK(loaded.mode == Mode::fancy);
  CHECK(loaded.side == Side::right);
  CHECK(loaded.letter == Letter::z);
  CHECK(loaded.seed == (std::uint64_t{1} << 63) - 1);
}

TEST_CASE("Hyper-parameters that a field cannot hold are refused by name", "[checkpoint][host]") {
  const auto message = [](const std::string& field, ckpt::HyperParameter wrong) {
    return message_of<so::CheckpointError>([&] {
      static_cast<void>(reloaded({}, [&](const std::string& name, ckpt::HyperParameter& value) {
        if (name == field) value = wrong;
      }));
    });
  };
  CHECK(message("on", std::int64_t{1}).find("'default': on cannot be 1") != std::string::npos);
  CHECK(message("on", 0.5).find("'default': on cannot be 0.5") != std::string::npos);
  CHECK(message("small", std::int64_t{32768}).find("'default': small cannot be 32768") != std::string::npos);
  CHECK(message("small", 1e300).find("'default': small cannot be 1e+300") != std::string::npos);
  CHECK(message("small", true).find("'default': small cannot be true") != std::string::npos);
  CHECK(message("mode", std::int64_t{-1}).find("'default': mode cannot be -1") != std::string::npos);
  CHECK(message("mode", std::int64_t{256}).find("'default': mode cannot be 256") != std::string::npos);
  CHECK(message("side", std::int64_t{2}).find("'default': side cannot be 2") != std::string::npos);
  CHECK(message("letter", std::int64_t{1000}).find("'default': letter cannot be 1000") != std::string::npos);
  CHECK(message("seed", std::int64_t{-1}).find("'default': seed cannot be -1") != std::string::npos);
  CHECK(message("bound", 1e300).find("'default': bound cannot be 1e+300") != std::string::npos);
  CHECK(message("lr", true).find("'default': lr cannot be true") != std::string::npos);
  CHECK(message("lr", std::int64_t{2}) == "");
}

TEST_CASE("A hyper-parameter that is NaN on both sides is no difference", "[checkpoint][host]") {
  using Optimizer = ThreadsOptimizer<ManyFields>;
  DurableFiles files;
  const auto notes = on_ranks(1, [&](HostThreads comm) {
    Optimizer::Config config{.groups = {{"default", {.unknown = std::numeric_limits<double>::quiet_NaN()}}}};
    Engine<Optimizer> engine(table_of_sizes({300}), config, std::move(comm));
    ckpt::save(engine.optimizer, run_directory, {.files = &files}, {});
    return ckpt::load(engine.optimizer, run_directory, {.files = &files}, {}).notes;
  });
  CHECK(notes.front().empty());
  const ckpt::Checkpoint saved(ckpt::newest(run_directory, files), files);
  CHECK(ckpt::diff(saved, saved).same());
}

TEST_CASE("A hyper-parameter that could not be read back is refused at save", "[checkpoint][host]") {
  const ManyFields rule{.seed = std::uint64_t{1} << 63};
  const std::string message = message_of<so::CheckpointError>(
      [&] { static_cast<void>(reloaded(rule, [](const std::string&, ckpt::HyperParameter&) {})); });
  CHECK(message.find("'seed' is 9223372036854775808: files hold whole numbers below 2^63") !=
        std::string::npos);
  CHECK(message.find("was not begun") != std::string::npos);
}

TEST_CASE("A save beside a generation with the last number that there is says so", "[checkpoint][host]") {
  DurableFiles files;
  files.make_directory(run_directory / "generation-9223372036854775807-iteration-1");
  const auto messages = messages_of_ranks<so::CheckpointError>(2, [&](HostThreads comm) {
    CheckpointEngine<CheckpointAdam> engine(std::move(comm));
    ckpt::save(engine.optimizer, run_directory, {.files = &files}, {});
  });
  for (const std::string& message : messages) CHECK(message.find("the last number") != std::string::npos);
}
