// SPDX-License-Identifier: Apache-2.0
#include <checkpoint_tools/saved.hpp>
#include <support/watched_new.hpp>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include <limits>

using namespace test;
using Catch::Matchers::ContainsSubstring;
using checkpoint::Checkpoint;
using checkpoint::DiffReport;

namespace {

/// Like number(), but for a few elements.
float other_number(std::string_view parameter, std::string_view state, std::int64_t index) {
  if (parameter == "embedding" && state == "exp_avg" && index >= 1500 && index % 100 == 3)
    return number(parameter, state, index) + static_cast<float>(index - 1500);
  if (parameter == "layer.2.bias" && state == "master") return std::numeric_limits<float>::quiet_NaN();
  if (parameter == "layer.10.weight" && state == "exp_avg_sq" && index == 18) return 0.0f;  // was -0.0f
  return number(parameter, state, index);
}

}  // namespace

TEST_CASE("checkpoints with the same numbers do not differ, however they are stored", "[checkpoint][host]") {
  const int a = GENERATE(1, 3);
  const int b = GENERATE(1, 2, 8);
  CAPTURE(a, b);
  const ScratchFolder folder;
  const Checkpoint first(save_numbers(folder / "a", a, awkward_tensors()));
  const Checkpoint second(
      save_numbers<so::FullPrecision, so::PerParameterSharding>(folder / "b", b, awkward_tensors(), 100));
  checkpoint::merge(second, folder / "b.safetensors");
  const Checkpoint merged(folder / "b.safetensors");
  for (const auto& [x, y] : {std::pair(&first, &second), std::pair(&second, &first),
                             std::pair(&first, &merged), std::pair(&merged, &first)}) {
    const DiffReport report = checkpoint::diff(*x, *y);
    CHECK(report.same());
    CHECK(report.manifest.empty());
    CHECK(report.tensors.empty());
    CHECK(report.tensors_compared == 3 * 8);
    CHECK(!report.storage.empty());
  }
}

TEST_CASE("numbers that differ are counted, measured and located", "[checkpoint][host]") {
  const int world = GENERATE(1, 2, 5);
  const bool merge = GENERATE(false, true);
  CAPTURE(world, merge);
  const ScratchFolder folder;
  const Checkpoint a(save_numbers(folder / "a", 3, awkward_tensors()));
  auto path = save_numbers(folder / "b", world, awkward_tensors(), 2048, other_number);
  if (merge) path = checkpoint::merge(Checkpoint(path), folder / "b.safetensors").file;
  const DiffReport report = checkpoint::diff(a, Checkpoint(path));
  CHECK_FALSE(report.same());
  CHECK(report.manifest.empty());
  REQUIRE(report.tensors.size() == 3);

  const auto& embedding = report.tensors[0];
  CHECK(embedding.parameter == "embedding");
  CHECK(embedding.state == "exp_avg");
  CHECK(embedding.elements == 2018);
  CHECK(embedding.differing == 6);  // 1503, 1603, …, 2003
  CHECK(embedding.largest == 503);
  CHECK(embedding.first == 1503);
  CHECK(embedding.first_b - embedding.first_a == 3);

  CHECK(report.tensors[1].parameter == "layer.2.bias");  // before layer.10
  CHECK(report.tensors[1].largest == std::numeric_limits<double>::infinity());
  CHECK(report.tensors[2].parameter == "layer.10.weight");
  CHECK(report.tensors[2].differing == 1);
  CHECK(report.tensors[2].largest == 0);
  CHECK(report.tensors[2].first == 18);
}

TEST_CASE("what manifests say differently is told in words", "[checkpoint][host]") {
  const ScratchFolder folder;
  const checkpoint::Manifest a = Checkpoint(save_numbers(folder / "a", 2, awkward_tensors())).manifest();
  checkpoint::Manifest b = a;
  const auto told = [&] {
    std::string text;
    for (const std::string& line : checkpoint::detail::ManifestDifferences(a, b).meaning())
      text += line + "\n";
    return text;
  };
  CHECK(told() == "");
  b.iteration = 30;
  b.groups[0].hyper_parameters[0].second = 0.5;
  b.groups[1].name = "flat";
  b.extras["schedule"] = "x";
  b.parameter_type = "bf16";
  b.loss_scale = checkpoint::Manifest::LossScale{};
  CHECK(told() ==
        "iteration: 20 in A, 30 in B\n"
        "a loss scale is in B only\n"
        "type of parameters: 'fp32' in A, 'bf16' in B\n"
        "group 'decay': lr: 0.01 in A, 0.5 in B\n"
        "group 'plain' is in A only\n"
        "group 'flat' is in B only\n"
        "extra text 'schedule' is in B only\n");
  b = a;
  b.parameters[0].name = "renamed";
  b.parameters[1].shape = {3, 257};
  b.parameters[2].group = "decay";
  b.parameters[4].frozen = true;
  CHECK(told() ==
        "parameter 'layer.10.weight' is in A only\n"
        "parameter 'layer.2.weight': shape [257, 3] in A, [3, 257] in B\n"
        "parameter 'layer.2.bias': group: 'plain' in A, 'decay' in B\n"
        "parameter 'scale': trainable in A, frozen in B\n"
        "parameter 'renamed' is in B only\n");
}

TEST_CASE("checkpoints of other iterations differ though their numbers are the same", "[checkpoint][host]") {
  const ScratchFolder folder;
  const Checkpoint a(save_numbers(folder / "a", 2, awkward_tensors()));
  const Checkpoint b(save_numbers(folder / "b", 3, awkward_tensors(), 4096, number, 30));
  const DiffReport report = checkpoint::diff(a, b);
  CHECK_FALSE(report.same());
  CHECK(report.manifest ==
        std::vector<std::string>{"iteration: 20 in A, 30 in B", "updates: 19 in A, 29 in B"});
  CHECK(report.tensors.empty());
}

TEST_CASE("tables in another order have the same tensors and one difference", "[checkpoint][host]") {
  const ScratchFolder folder;
  const std::vector<Packed> forwards{{"p1", {300}}, {"p2", {7}}};
  const std::vector<Packed> backwards{{"p2", {7}}, {"p1", {300}}};
  const Checkpoint a(save_numbers(folder / "a", 2, forwards));
  const Checkpoint b(save_numbers(folder / "b", 3, backwards));
  const DiffReport report = checkpoint::diff(a, b);
  CHECK(report.manifest == std::vector<std::string>{"the tables list the parameters in another order"});
  CHECK(report.tensors.empty());
  CHECK(report.tensors_compared == 6);
}

TEST_CASE("data that begin anywhere, as in other programs' files, are compared all the same",
          "[checkpoint][host]") {
  // Blocks cut elements of the larger tensor.
  const std::vector<Packed> tensors{{"a", {3}, "plain"}, {"b", {700, 1000}, "decay"}};
  const ScratchFolder folder;
  const Checkpoint whole(save_numbers(folder / "a", 2, tensors, 1 << 20));
  const std::string content = content_of(checkpoint::merge(whole, folder / "m.safetensors").file);
  for (int more = 1; more < 4; ++more) {
    CAPTURE(more);
    std::string moved = content;
    std::uint64_t length = 0;
    std::memcpy(&length, moved.data(), sizeof(length));
    moved.insert(8 + length, std::string(static_cast<std::size_t>(more), ' '));
    length += static_cast<std::uint64_t>(more);
    std::memcpy(moved.data(), &length, sizeof(length));
    write_content(folder / "moved.safetensors", moved);
    const Checkpoint merged(folder / "moved.safetensors");
    for (const auto& [x, y] : {std::pair(&merged, &whole), std::pair(&whole, &merged)}) {
      const DiffReport report = checkpoint::diff(*x, *y);
      CHECK(report.tensors_compared == 6);
      CHECK(report.tensors.empty());
    }
    moved[moved.size() - 1] = static_cast<char>(moved[moved.size() - 1] ^ 1);
    write_content(folder / "moved.safetensors", moved);
    const DiffReport report = checkpoint::diff(merged, whole);
    REQUIRE(report.tensors.size() == 1);
    CHECK(report.tensors[0].differing == 1);
    CHECK(report.tensors[0].first == 699'999);
  }
}

TEST_CASE("a file that the manifest does not name is refused by all that read a generation",
          "[checkpoint][host]") {
  const ScratchFolder folder;
  const auto a = save_numbers(folder / "a", 2, awkward_tensors());
  const auto b = save_numbers(folder / "b", 3, awkward_tensors());
  write_content(b / "stray.safetensors", "");
  const std::vector<std::string> told{
      message_of<so::CheckpointError>([&] { (void)checkpoint::diff(Checkpoint(a), Checkpoint(b)); }),
      message_of<so::CheckpointError>([&] { (void)checkpoint::diff(Checkpoint(b), Checkpoint(a)); }),
      message_of<so::CheckpointError>(
          [&] { (void)checkpoint::merge(Checkpoint(b), folder / "m.safetensors"); }),
      message_of<so::CheckpointError>(
          [&] { (void)checkpoint::reshard(Checkpoint(b), folder / "c", {.world = 2}); }),
      checkpoint::verify(Checkpoint(b)).front()};
  for (const std::string& message : told) CHECK_THAT(message, ContainsSubstring("stray.safetensors"));
  CHECK(names_in(folder.path()) == std::vector<std::string>{"a", "b"});
}

TEST_CASE("a damaged checkpoint on either side is an error, not a difference", "[checkpoint][host]") {
  const ScratchFolder folder;
  const auto a = save_numbers(folder / "a", 2, awkward_tensors());
  const auto b = save_numbers(folder / "b", 3, awkward_tensors());
  damage(b / "optimizer_pp-0-of-1_dp-2-of-3.safetensors", 5);
  for (const auto& [x, y] : {std::pair(a, b), std::pair(b, a)}) {
    CHECK_THAT(message_of<so::CheckpointError>(
                   [&, &x = x, &y = y] { (void)checkpoint::diff(Checkpoint(x), Checkpoint(y)); }),
               ContainsSubstring("dp-2-of-3.safetensors") && ContainsSubstring("is damaged"));
  }
}

TEST_CASE("a comparison holds a few megabytes, whatever the size", "[checkpoint][host]") {
  const ScratchFolder folder;
  const std::vector<Packed> tensors{{"a", {1'500'000}}, {"b", {1'300'003}}};
  const Checkpoint a(save_numbers(folder / "a", 3, tensors, 1 << 20));
  const Checkpoint b(save_numbers(folder / "b", 2, tensors, 1 << 18));
  std::int64_t done = 0;
  std::int64_t total = 0;
  Allocations& memory = allocations_here();
  const std::int64_t before = memory.live;
  memory.begin();
  const DiffReport report = checkpoint::diff(a, b, [&](std::int64_t now, std::int64_t of) {
    done = now;
    total = of;
  });
  CHECK(report.same());
  CHECK(memory.peak - before < 6'000'000);
  CHECK(done == total);
}
