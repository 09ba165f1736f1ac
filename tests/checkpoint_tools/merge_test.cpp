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

/// What is wrong with the numbers of a merged file, read without the library.
std::string wrong_in(const std::filesystem::path& path, const std::vector<Packed>& tensors) {
  const PlainFile file(path);
  std::size_t named = 1;  // __metadata__
  for (const Packed& tensor : tensors) {
    if (tensor.frozen || !tensor.alias_of.empty()) continue;
    for (const std::string state : {"master", "exp_avg", "exp_avg_sq"}) {
      const std::string name = state == "master" ? tensor.name : tensor.name + "/" + state;
      ++named;
      if (!file.header.contains(name)) return name + " is missing";
      if (file.header[name]["shape"].get<std::vector<std::int64_t>>() != tensor.shape.dimensions())
        return name + " has another shape";
      const std::vector<float> values = file.tensor(name);
      if (static_cast<std::int64_t>(values.size()) != tensor.shape.numel()) return name + " has another size";
      for (std::size_t i = 0; i < values.size(); ++i) {
        const float expected = number(tensor.name, state, static_cast<std::int64_t>(i));
        if (std::bit_cast<std::uint32_t>(values[i]) != std::bit_cast<std::uint32_t>(expected))
          return name + " " + std::to_string(i);
      }
    }
  }
  return file.header.size() == named ? "" : "there are more tensors";
}

}  // namespace

TEST_CASE("a merged file holds every tensor whole and in its shape", "[checkpoint][host]") {
  const int world = GENERATE(1, 2, 3, 8);
  const bool per_parameter = GENERATE(false, true);
  CAPTURE(world, per_parameter);
  const ScratchFolder folder;
  const auto generation = per_parameter ? save_numbers<so::FullPrecision, so::PerParameterSharding>(
                                              folder / "saved", world, awkward_tensors())
                                        : save_numbers(folder / "saved", world, awkward_tensors());
  const auto report = checkpoint::merge(Checkpoint(generation), folder / "merged.safetensors");
  CHECK(wrong_in(folder / "merged.safetensors", awkward_tensors()) == "");
  CHECK(report.file == folder / "merged.safetensors");
  CHECK(report.bytes == static_cast<std::int64_t>(std::filesystem::file_size(report.file)));
  CHECK(report.tensors == 3 * 8);
  CHECK(report.notes.empty());
  CHECK(names_in(folder.path()) == std::vector<std::string>{"merged.safetensors", "saved"});
}

TEST_CASE("a merged file lists its tensors in numeric order of their names", "[checkpoint][host]") {
  const ScratchFolder folder;
  const auto generation = save_numbers(folder / "saved", 2, awkward_tensors());
  checkpoint::merge(Checkpoint(generation), folder / "merged.safetensors");
  const std::string content = content_of(folder / "merged.safetensors");
  std::uint64_t length = 0;
  std::memcpy(&length, content.data(), 8);
  std::vector<std::string> names;
  const auto header = nlohmann::ordered_json::parse(content.substr(8, length));
  for (const auto& item : header.items()) names.push_back(item.key());
  const std::vector<std::string> expected{
      "embedding",       "embedding/exp_avg",       "embedding/exp_avg_sq",        //
      "empty",           "empty/exp_avg",           "empty/exp_avg_sq",            //
      "layer.1.bias",    "layer.1.bias/exp_avg",    "layer.1.bias/exp_avg_sq",     //
      "layer.1.weight",  "layer.1.weight/exp_avg",  "layer.1.weight/exp_avg_sq",   //
      "layer.2.bias",    "layer.2.bias/exp_avg",    "layer.2.bias/exp_avg_sq",     //
      "layer.2.weight",  "layer.2.weight/exp_avg",  "layer.2.weight/exp_avg_sq",   //
      "layer.10.weight", "layer.10.weight/exp_avg", "layer.10.weight/exp_avg_sq",  //
      "scale",           "scale/exp_avg",           "scale/exp_avg_sq"};
  names.erase(names.begin());  // __metadata__
  CHECK(names == expected);
}

TEST_CASE("a merged file loads at any world, bit for bit", "[checkpoint][host]") {
  const int saved = GENERATE(1, 3, 4);
  const int loaded = GENERATE(1, 2, 5);
  CAPTURE(saved, loaded);
  const ScratchFolder folder;
  const auto merged = folder / "merged.safetensors";
  using Bf16 = so::Mixed<so::bf16, float, float>;
  checkpoint::merge(Checkpoint(save_numbers<Bf16>(folder / "saved", saved, awkward_tensors())), merged);
  CHECK(wrong_after_load<Bf16>(merged, loaded, awkward_tensors()) == "");
  CHECK(wrong_after_load<so::FullPrecision, so::PerParameterSharding>(merged, loaded, awkward_tensors()) ==
        "");
}

TEST_CASE("a merged file says all that the manifest said, but for the files", "[checkpoint][host]") {
  const ScratchFolder folder;
  checkpoint::SaveOptions options;
  options.extras = {{"schedule", "step 20"}};
  options.rank_extra = "random ";
  const Checkpoint source(save_numbers(folder / "saved", 3, awkward_tensors(), 4096, number, 20, options));
  const auto report = checkpoint::merge(source, folder / "merged.safetensors");
  checkpoint::Manifest expected = source.manifest();
  checkpoint::Manifest found = Checkpoint(folder / "merged.safetensors").manifest();
  expected.files.clear();
  found.files.clear();
  expected.world = found.world;
  CHECK(found == expected);
  REQUIRE(report.notes.size() == 1);
  CHECK_THAT(report.notes[0], ContainsSubstring("3 ranks"));
}

TEST_CASE("a merge of uneven buckets leaves no gap and shifts nothing", "[checkpoint][host][B006]") {
  const std::int64_t bucket_bytes = GENERATE(72, 44, 4);  // 18, 11 and 1 elements: 1, 2 and 3 buckets
  CAPTURE(bucket_bytes);
  const ScratchFolder folder;
  const auto logical = [](std::string_view parameter, std::string_view state, std::int64_t i) {
    const std::int64_t begin = parameter == "p0" ? 0 : parameter == "p1" ? 5 : 11;
    return static_cast<float>((state == "exp_avg" ? 1000 : state == "exp_avg_sq" ? 2000 : 1) + begin + i);
  };
  const std::vector<Packed> tensors{{"p0", {5}, "decay"}, {"p1", {6}, "plain"}, {"p2", {7}, "default"}};
  const auto generation = save_numbers<so::FullPrecision, so::PerParameterSharding>(
      folder / "saved", 4, tensors, bucket_bytes, logical);
  checkpoint::merge(Checkpoint(generation), folder / "merged.safetensors");
  const PlainFile merged(folder / "merged.safetensors");
  for (const int base : {1000, 2000}) {
    const std::string state = base == 1000 ? "/exp_avg" : "/exp_avg_sq";
    std::vector<float> all;
    for (const std::string name : {"p0", "p1", "p2"}) {
      for (const float value : merged.tensor(name + state)) all.push_back(value);
    }
    std::vector<float> expected;
    for (int i = 0; i < 18; ++i) expected.push_back(static_cast<float>(base + i));
    CHECK(all == expected);
  }
}

TEST_CASE("a merge gives back 57 elements of one group or two, and no padding", "[checkpoint][host][B007]") {
  const bool two = GENERATE(false, true);
  const int world = GENERATE(2, 4);
  CAPTURE(two, world);
  const ScratchFolder folder;
  std::vector<Packed> tensors{{"p", {two ? 31 : 57}, "decay"}};
  if (two) tensors.push_back({"q", {26}, "plain"});
  const auto half = [](std::string_view parameter, std::string_view, std::int64_t i) {
    return static_cast<float>((parameter == "q" ? 31 : 0) + i) + 0.5f;
  };
  const auto generation = save_numbers(folder / "saved", world, tensors, 64, half);
  checkpoint::merge(Checkpoint(generation), folder / "merged.safetensors");

  const PlainFile merged(folder / "merged.safetensors");
  std::vector<float> all;
  for (const Packed& tensor : tensors) {
    for (const float value : merged.tensor(tensor.name)) all.push_back(value);
  }
  REQUIRE(all.size() == 57);
  for (std::size_t i = 0; i < 57; ++i) CHECK(all[i] == static_cast<float>(i) + 0.5f);
  CHECK(merged.data.size() == 57 * 3 * sizeof(float));

  const auto manifest =
      nlohmann::json::parse(merged.header["__metadata__"][checkpoint::merged_key].get<std::string>());
  std::int64_t logical = 0;
  for (const auto& parameter : manifest["parameters"]) logical += parameter["shape"][0].get<std::int64_t>();
  CHECK(logical == 57);
}

TEST_CASE("a merge refuses sizes that do not add up", "[checkpoint][host][B007]") {
  const ScratchFolder folder;
  const auto generation = save_numbers(folder / "saved", 2, {{"p", {57}}}, 64);
  const auto path = generation / checkpoint::manifest_name;
  const checkpoint::Manifest whole = checkpoint::manifest_from_text(content_of(path), "manifest");
  const auto merge_with = [&](const checkpoint::Manifest& manifest) {
    write_content(path, checkpoint::to_text(manifest));
    return message_of<so::CheckpointError>(
        [&] { checkpoint::merge(Checkpoint(generation), folder / "merged.safetensors"); });
  };
  checkpoint::Manifest changed = whole;
  changed.files[0].pieces[0].range.end -= 1;
  CHECK_THAT(merge_with(changed), ContainsSubstring("has no file for elements 56..57 of 'p'"));
  changed = whole;
  changed.parameters[0].shape = {58};
  CHECK_THAT(merge_with(changed), ContainsSubstring("has no file for elements 57..58 of 'p'"));
  CHECK(names_in(folder.path()) == std::vector<std::string>{"saved"});
  CHECK(merge_with(whole) == "");
}

TEST_CASE("a merge refuses names that would be one tensor", "[checkpoint][host]") {
  const ScratchFolder folder;
  const auto refused = [&](const std::vector<Packed>& tensors) {
    const ScratchFolder saved;
    const auto generation = save_numbers(saved.path(), 2, tensors);
    return message_of<so::CheckpointError>(
        [&] { checkpoint::merge(Checkpoint(generation), folder / "merged.safetensors"); });
  };
  CHECK_THAT(refused({{"a", {3}}, {"a/exp_avg", {3}}}),
             ContainsSubstring("state 'exp_avg' of parameter 'a'") &&
                 ContainsSubstring("and parameter 'a/exp_avg' would both be called 'a/exp_avg'") &&
                 ContainsSubstring("another name"));
  CHECK_THAT(refused({{"__metadata__", {3}}}), ContainsSubstring("the metadata of the file"));
  CHECK(names_in(folder.path()).empty());
  CHECK(refused({{"a", {3}}, {"a/exp_avg", {3}, "default", true}}) == "");  // frozen: not stored
}

TEST_CASE("a merge replaces a file only if told to", "[checkpoint][host]") {
  const ScratchFolder folder;
  const auto output = folder / "merged.safetensors";
  const auto generation = save_numbers(folder / "saved", 2, awkward_tensors());
  write_content(output, "old");
  const std::string refusal =
      message_of<so::CheckpointError>([&] { checkpoint::merge(Checkpoint(generation), output); });
  CHECK_THAT(refusal, ContainsSubstring("exists; MergeOptions::overwrite replaces it"));
  CHECK(content_of(output) == "old");
  checkpoint::merge(Checkpoint(generation), output, {.overwrite = true});
  CHECK(wrong_in(output, awkward_tensors()) == "");
  CHECK(names_in(folder.path()) == std::vector<std::string>{"merged.safetensors", "saved"});
}

TEST_CASE("a merge refuses outputs that could not be found or would do harm", "[checkpoint][host]") {
  const ScratchFolder folder;
  const auto generation = save_numbers(folder / "saved", 2, awkward_tensors());
  const Checkpoint source(generation);
  const auto refusal = [&](const std::filesystem::path& output, bool overwrite = true) {
    return message_of<so::CheckpointError>(
        [&] { checkpoint::merge(source, output, {.overwrite = overwrite}); });
  };
  const auto before = names_in(generation);
  CHECK_THAT(refusal(folder / "merged.bin"), ContainsSubstring("must be called .safetensors"));
  CHECK_THAT(refusal(generation / "merged.safetensors"), ContainsSubstring("in a generation's folder"));
  std::filesystem::create_directory(folder / "d.safetensors");
  CHECK_THAT(refusal(folder / "d.safetensors"), ContainsSubstring("is a directory"));
  CHECK_THAT(refusal(folder / "nowhere" / "m.safetensors"), ContainsSubstring("No such file"));
  checkpoint::merge(source, folder / "m.safetensors");
  CHECK_THAT(message_of<so::CheckpointError>([&] {
               checkpoint::merge(Checkpoint(folder / "m.safetensors"), folder / "again.safetensors");
             }),
             ContainsSubstring("whole tensors already"));
  CHECK(names_in(generation) == before);
}

TEST_CASE("a merge of a damaged checkpoint names the file and leaves nothing", "[checkpoint][host]") {
  const ScratchFolder folder;
  const auto generation = save_numbers(folder / "saved", 3, awkward_tensors());
  const std::string file = "optimizer_pp-0-of-1_dp-1-of-3.safetensors";
  damage(generation / file, 40);
  const std::string message = message_of<so::CheckpointError>(
      [&] { checkpoint::merge(Checkpoint(generation), folder / "merged.safetensors"); });
  CHECK_THAT(message, ContainsSubstring(file) && ContainsSubstring("is damaged"));
  CHECK(names_in(folder.path()) == std::vector<std::string>{"saved"});
}

TEST_CASE("a merge that fails anywhere leaves the old file and no other", "[checkpoint][host]") {
  const ScratchFolder folder;
  const auto output = folder / "merged.safetensors";
  const auto generation = save_numbers(folder / "saved", 2, awkward_tensors());
  QuickFiles quick;
  WatchedFiles counted(quick);
  checkpoint::merge(Checkpoint(generation), output, {.files = &counted});
  REQUIRE(counted.calls() > 10);
  write_content(output, "old");
  for (std::int64_t k = 1; k < counted.calls(); ++k) {  // the last syncs the directory: after the rename
    CAPTURE(k);
    WatchedFiles files(quick);
    files.fail_at = k;
    const std::string message = message_of<so::CheckpointError>(
        [&] { checkpoint::merge(Checkpoint(generation), output, {.overwrite = true, .files = &files}); });
    REQUIRE_THAT(message, ContainsSubstring(files.reason));
    REQUIRE(content_of(output) == "old");
    REQUIRE(names_in(folder.path()) == std::vector<std::string>{"merged.safetensors", "saved"});
  }
}

TEST_CASE("a merge tells how far it is", "[checkpoint][host]") {
  const ScratchFolder folder;
  const auto generation = save_numbers(folder / "saved", 3, awkward_tensors());
  std::vector<std::int64_t> told;
  std::int64_t total = 0;
  checkpoint::merge(Checkpoint(generation), folder / "merged.safetensors",
                    {.progress = [&](std::int64_t done, std::int64_t of) {
                      told.push_back(done);
                      total = of;
                    }});
  CHECK(total == checkpoint::total_bytes(Checkpoint(generation).manifest()));
  CHECK(std::is_sorted(told.begin(), told.end()));
  REQUIRE(!told.empty());
  CHECK(told.back() == total);
}

TEST_CASE("a merge holds a few megabytes, whatever the size", "[checkpoint][host]") {
  const ScratchFolder folder;
  const std::vector<Packed> tensors{{"a", {1'500'000}}, {"b", {1'300'003}}, {"c", {0}}};
  const auto generation = save_numbers(folder / "saved", 3, tensors, 1 << 20);
  Allocations& memory = allocations_here();
  const std::int64_t before = memory.live;
  memory.begin();
  const auto report = checkpoint::merge(Checkpoint(generation), folder / "merged.safetensors");
  CHECK(report.bytes > 32'000'000);
  CHECK(memory.peak - before < 3'000'000);
}
