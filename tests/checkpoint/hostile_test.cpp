// SPDX-License-Identifier: Apache-2.0
// Files that somebody changed on purpose: whatever a manifest or a header says, loading ends in an error or
// in what was saved, and takes no memory for what a file only claims.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <support/small_checkpoint.hpp>
#include <support/watched_new.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

using namespace test;

namespace {

using Files = DurableFiles;
using Json = nlohmann::ordered_json;
using Random = std::mt19937_64;
using SoloEngine = CheckpointEngine<SoloAdam>;

/// Texts that are where a value was.
const std::vector<std::string> odd_values = {
    "-1",
    "0",
    "1",
    "2",
    "255",
    "256",
    "2147483648",
    "4294967296",
    "4611686018427387904",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "-9223372036854775808",
    "1e308",
    "1e400",
    "-1e400",
    "1e-400",
    "0.5",
    "null",
    "true",
    "false",
    "\"\"",
    "\"x\"",
    "\"..\"",
    "\"/etc/passwd\"",
    "\"\\u0000\"",
    "\"\\ud800\"",
    "\"\xff\xfe\"",
    "[]",
    "{}",
    "[[]]",
    "[0,0]",
    "[0,1,2,3]",
    "[[0,0,1]]",
    "{\"\":0}",
    "NaN",
    "Infinity",
    "\"0000000000000000\"",
    "00",
    "+1",
    "'x'",
};

[[nodiscard]] std::size_t below(Random& random, std::size_t end) { return end == 0 ? 0 : random() % end; }

/// Borders of a JSON text's tokens.
[[nodiscard]] std::vector<std::string> tokens_of(const std::string& text) {
  std::vector<std::string> tokens;
  for (std::size_t at = 0; at < text.size();) {
    std::size_t end = at + 1;
    if (text[at] == '"') {
      while (end < text.size() && text[end] != '"') end += text[end] == '\\' ? 2 : 1;
      end = std::min(end + 1, text.size());
    } else if (std::isalnum(static_cast<unsigned char>(text[at])) != 0 || text[at] == '-') {
      while (end < text.size() && (std::isalnum(static_cast<unsigned char>(text[end])) != 0 ||
                                   text[end] == '.' || text[end] == '-' || text[end] == '+'))
        ++end;
    }
    tokens.push_back(text.substr(at, end - at));
    at = end;
  }
  return tokens;
}

[[nodiscard]] std::string joined(const std::vector<std::string>& tokens) {
  std::string text;
  for (const std::string& token : tokens) text += token;
  return text;
}

/// Changes a JSON text as text.
[[nodiscard]] std::string mutated_text(std::string text, Random& random) {
  auto tokens = tokens_of(text);
  const auto any = [&] { return below(random, tokens.size()); };
  const auto is_value = [](const std::string& token) {
    return token[0] == '"' || token[0] == '-' || std::isalnum(static_cast<unsigned char>(token[0])) != 0;
  };
  switch (random() % 9) {
    case 0:
      return text.substr(0, below(random, text.size()));
    case 1:  // tokens in another order
      for (int k = 0; k < 4; ++k) std::swap(tokens[any()], tokens[any()]);
      return joined(tokens);
    case 2: {  // a part of the tokens shuffled
      const std::size_t begin = any();
      const std::size_t end = std::min(begin + 8, tokens.size());
      for (std::size_t k = end; k > begin + 1; --k)
        std::swap(tokens[k - 1], tokens[begin + below(random, k - begin)]);
      return joined(tokens);
    }
    case 3:
    case 4:  // another value
      for (int tries = 0; tries < 100; ++tries) {
        std::string& token = tokens[any()];
        if (!is_value(token)) continue;
        token = odd_values[below(random, odd_values.size())];
        return joined(tokens);
      }
      return text;
    case 5: {  // deep nesting in place of a token
      const std::size_t depth = std::size_t{1} << (4 + below(random, 13));
      const std::string open = random() % 2 == 0 ? "[" : "{\"a\":";
      std::string nest;
      for (std::size_t k = 0; k < depth; ++k) nest += open;
      nest += "1";
      if (random() % 2 == 0) nest += std::string(depth, open == "[" ? ']' : '}');
      tokens[any()] = nest;
      return joined(tokens);
    }
    case 6: {  // a run of the text twice
      const std::size_t begin = below(random, text.size());
      const std::size_t count = below(random, std::min<std::size_t>(200, text.size() - begin));
      return text.insert(begin, text.substr(begin, count));
    }
    case 7:  // bytes that are no UTF-8, control characters, zeros
      for (int k = 0; k < 3; ++k)
        text[below(random, text.size())] = "\xc3\xff\x80\x00\x1f\x7f"[below(random, 6)];
      return text;
    default: {  // a member's name twice
      const std::size_t colon = text.find("\":", below(random, text.size()));
      if (colon == std::string::npos) return text;
      const std::size_t begin = text.rfind('"', colon - 1);
      const std::string name = text.substr(begin, colon + 2 - begin);
      return text.insert(begin, name + " 0, ");
    }
  }
}

/// All values of a JSON value, itself first.
void collect(Json& json, std::vector<Json*>& all) {
  all.push_back(&json);
  if (!json.is_structured()) return;
  for (Json& child : json) collect(child, all);
}

/// Changes a JSON value to another that is JSON.
void mutate_value(Json& root, Random& random) {
  std::vector<Json*> all;
  collect(root, all);
  Json& json = *all[below(random, all.size())];
  if (json.is_number_integer() && random() % 4 != 0) {
    const auto value = json.get<std::int64_t>();
    const std::vector<std::int64_t> others = {value + 1,
                                              value - 1,
                                              -value,
                                              0,
                                              value * 2,
                                              std::int64_t{1} << 40,
                                              std::int64_t{1} << 62,
                                              (std::numeric_limits<std::int64_t>::max)()};
    json = others[below(random, others.size())];
  } else if (json.is_structured() && !json.empty() && random() % 4 != 0) {
    const auto at = static_cast<std::ptrdiff_t>(below(random, json.size()));
    if (random() % 2 == 0) {
      json.erase(std::next(json.begin(), at));
    } else if (json.is_array()) {
      const Json copy = *std::next(json.begin(), at);
      json.push_back(copy);
    } else {
      json["more"] = *std::next(json.begin(), at);
    }
  } else {
    const Json parsed = Json::parse(odd_values[below(random, odd_values.size())], nullptr, false);
    json = parsed.is_discarded() ? Json("\xff") : parsed;
  }
}

[[nodiscard]] std::string dumped(const Json& json) {
  return json.dump(1, ' ', false, Json::error_handler_t::replace);
}

/// The text of a manifest without its checksum: a JSON value.
[[nodiscard]] std::string without_checksum(const std::string& manifest) {
  return manifest.substr(0, manifest.rfind(",\n \"checksum\"")) + "\n}";
}

/// A manifest of that text, with the right checksum.
[[nodiscard]] std::string sealed(std::string text) {
  if (text.ends_with("\n}")) text.resize(text.size() - 2);
  text += ",\n \"checksum\": \"";
  return text + ckpt::hexadecimal(ckpt::checksum(std::as_bytes(std::span(text)))) + "\"\n}\n";
}

/// A file of tensors with another header of any length, and the data that it had.
[[nodiscard]] std::string with_header(const std::string& file, const std::string& header,
                                      std::uint64_t length) {
  std::uint64_t old = 0;
  for (std::size_t k = 8; k-- > 0;) old = old << 8 | static_cast<unsigned char>(file[k]);
  std::string result;
  for (std::size_t k = 0; k < 8; ++k) result += static_cast<char>(length >> (8 * k));
  return result + header + file.substr(8 + old);
}

[[nodiscard]] std::string header_of(const std::string& file) {
  std::uint64_t length = 0;
  for (std::size_t k = 8; k-- > 0;) length = length << 8 | static_cast<unsigned char>(file[k]);
  return file.substr(8, length);
}

/// Loads, and says what is wrong with how that ended.
class Judge {
 public:
  explicit Judge(const Disk& whole)
      : files(whole),
        generation(ckpt::generations(small_directory, files).back().path),
        manifest(ckpt::Checkpoint(generation, files).manifest()),
        engine_(small_table(), checkpoint_config<SoloAdam>(), so::Solo<so::Host>()) {
    engine_.train(1);
    before_ = engine_.own_snapshot();
    ckpt::load(engine_.optimizer, generation, {.files = &files}, {});
    saved_ = engine_.own_snapshot();
    restore();
  }

  /// @param same  whether nothing but the saved values can come out
  [[nodiscard]] std::string fault_of_load(const std::filesystem::path& path, bool same,
                                          bool lenient = false) {
    std::int64_t size = 0;
    for (const auto& file : files.all_files(small_directory))
      size = std::max(size, static_cast<std::int64_t>(files.bytes(file).size()));
    std::string message;
    std::string fault;
    auto& allocations = allocations_here();
    allocations.begin();
    const std::int64_t live = allocations.live;
    try {
      ckpt::load(engine_.optimizer, path, {.lenient = lenient, .files = &files}, {});
    } catch (const so::CheckpointError& error) {
      message = error.what();
      if (message.empty()) fault = "an error without a text";
    } catch (const std::exception& error) {
      fault = std::string("another kind of error: ") + error.what();
    }
    largest = std::max(largest, static_cast<double>(allocations.largest) / static_cast<double>(size));
    peak = std::max(peak, static_cast<double>(allocations.peak - live) / static_cast<double>(size));
    (message.empty() ? loaded : refused) += 1;
    const Snapshot now = engine_.own_snapshot();
    if (fault.empty() && !message.empty() && now != before_) fault = "refused, and changed: " + message;
    if (fault.empty() && message.empty() && same && now.bits != saved_.bits) fault = "loaded other values";
    if (now != before_) restore();
    return fault;
  }

  Files files;
  std::filesystem::path generation;
  ckpt::Manifest manifest;
  int loaded = 0;
  int refused = 0;
  double largest = 0;  ///< single request, in sizes of the largest file
  double peak = 0;     ///< all at a time, alike

 private:
  /// Back to what is not the checkpoint's.
  void restore() {
    std::size_t at = 0;
    auto counters = engine_.optimizer.counters({});
    counters.iteration = before_.iteration;
    counters.updates = before_.updates;
    engine_.optimizer.set_counters(counters, {});
    for (auto& p : engine_.parameters) p = from_bits<float>(before_.bits[at++]);
    for (const auto& run : engine_.optimizer.states()) {
      for (std::int64_t i = 0; i < run.range.size(); ++i) run.data[i] = from_bits<float>(before_.bits[at++]);
    }
  }

  SoloEngine engine_;
  Snapshot before_;
  Snapshot saved_;
};

/// Whether a manifest still says the same of where the numbers are and what they mean.
[[nodiscard]] bool says_the_same(const std::string& text, const ckpt::Manifest& saved) {
  try {
    const auto m = ckpt::manifest_from_text(text, "");
    return m.files == saved.files && m.parameters == saved.parameters && m.states == saved.states &&
           m.rule == saved.rule && m.rule_version == saved.rule_version;
  } catch (const so::CheckpointError&) {
    return false;
  }
}

}  // namespace

TEST_CASE("Manifests that were changed, with their checksum or without, are refused or load what was saved",
          "[checkpoint][host][B085]") {
  const int world = GENERATE(1, 3);
  const bool lenient = GENERATE(false, true);
  CAPTURE(world, lenient);
  Judge judge(small_checkpoints(world));
  const auto path = judge.generation / ckpt::manifest_name;
  const std::string whole = judge.files.bytes(path);
  REQUIRE(sealed(without_checksum(whole)) == whole);
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    Random random(seed);
    std::string text = without_checksum(whole);
    if (random() % 2 == 0) {
      text = mutated_text(text, random);
    } else {
      Json json = Json::parse(text);
      for (std::uint64_t k = 0; k <= random() % 3; ++k) mutate_value(json, random);
      text = dumped(json);
    }
    CAPTURE(seed, text);
    const std::string resealed = sealed(text);
    judge.files.bytes(path) = resealed;
    REQUIRE(judge.fault_of_load(judge.generation, says_the_same(resealed, judge.manifest), lenient) == "");
    std::string stale = resealed;
    stale.replace(stale.size() - 20, 16, whole, whole.size() - 20, 16);
    const int loaded = judge.loaded;
    judge.files.bytes(path) = stale;
    REQUIRE(judge.fault_of_load(judge.generation, true, lenient) == "");
    REQUIRE((judge.loaded == loaded || stale == whole));
  }
  INFO("loaded " << judge.loaded << ", refused " << judge.refused << ", largest request " << judge.largest
                 << ", peak " << judge.peak << " sizes of the file");
  CHECK(judge.loaded > 10);
  CHECK(judge.refused > 500);
  CHECK(judge.largest < 8);
  CHECK(judge.peak < 40);
}

TEST_CASE("Headers that were changed, with their checksums or without, are refused or load what was saved",
          "[checkpoint][host][B085]") {
  const int world = GENERATE(1, 3);
  CAPTURE(world);
  Judge judge(small_checkpoints(world));
  const auto path = judge.generation / ckpt::manifest_name;
  const std::string whole_manifest = judge.files.bytes(path);
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    Random random(seed);
    const std::size_t k = below(random, static_cast<std::size_t>(world));
    const auto shard = judge.generation / judge.manifest.files[k].name;
    const std::string whole = judge.files.bytes(shard);
    std::string header = header_of(whole);
    if (random() % 2 == 0) {
      header = mutated_text(header, random);
    } else {
      Json json = Json::parse(header);
      mutate_value(json, random);
      header = dumped(json);
    }
    const std::vector<std::uint64_t> lengths = {header.size(),
                                                header.size(),
                                                header.size(),
                                                header.size() - 1,
                                                std::uint64_t{1} << 63,
                                                ~std::uint64_t{0},
                                                0,
                                                99'999'999};
    const std::string file = with_header(whole, header, lengths[below(random, lengths.size())]);
    CAPTURE(seed, header);
    judge.files.bytes(shard) = file;
    REQUIRE(judge.fault_of_load(judge.generation, true) == "");
    // A manifest that vouches for the file: its numbers are where they were, or the file is refused.
    ckpt::Manifest manifest = judge.manifest;
    manifest.files[k].bytes = static_cast<std::int64_t>(file.size());
    manifest.files[k].checksums = {ckpt::checksum(std::as_bytes(std::span(file)))};
    judge.files.bytes(path) = ckpt::to_text(manifest);
    REQUIRE(judge.fault_of_load(judge.generation, true) == "");
    static_cast<void>(ckpt::newest_whole(small_directory, judge.files));
    judge.files.bytes(path) = whole_manifest;
    judge.files.bytes(shard) = whole;
  }
  CHECK(judge.loaded > 50);
  CHECK(judge.refused > 500);
  CHECK(judge.largest < 8);
}

TEST_CASE("Merged files whose header was changed are refused or load what was saved",
          "[checkpoint][host][B085]") {
  Judge judge(small_checkpoints(1));
  // A merged file of the same state, by the format's description: whole tensors by name, the manifest inside.
  ckpt::SafetensorsHeader header;
  ckpt::Manifest inside = judge.manifest;
  inside.files.clear();
  header.metadata["shardopt"] = without_checksum(ckpt::to_text(inside));
  std::string data;
  const std::string shard = judge.files.bytes(judge.generation / judge.manifest.files[0].name);
  const ckpt::Checkpoint sharded(judge.generation, judge.files);
  const auto offsets = sharded.offsets(0);
  for (std::size_t p = 0; p < inside.parameters.size(); ++p) {
    for (std::size_t s = 0; s < inside.states.size(); ++s) {
      const auto& parameter = inside.parameters[p];
      header.append(ckpt::merged_name(parameter.name, inside.states[s]), parameter.shape);
      for (std::size_t k = 0; k < judge.manifest.files[0].pieces.size(); ++k) {
        const auto& piece = judge.manifest.files[0].pieces[k];
        if (piece.parameter != static_cast<std::int64_t>(p)) continue;
        data += shard.substr(static_cast<std::size_t>(offsets[s][k]),
                             static_cast<std::size_t>(piece.range.size()) * 4);
      }
    }
  }
  const std::filesystem::path path = small_directory / "merged.safetensors";
  const std::string whole = ckpt::to_bytes(header) + data;
  static_cast<void>(judge.files.create(path));
  judge.files.bytes(path) = whole;
  REQUIRE(judge.fault_of_load(path, true) == "");
  REQUIRE(judge.loaded == 1);
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    Random random(seed);
    std::string text = header_of(whole);
    Json json = Json::parse(text);
    bool same = false;
    if (seed % 4 == 0) {
      text = mutated_text(text, random);
    } else if (seed % 4 == 1) {
      mutate_value(json, random);
      text = dumped(json);
    } else {  // the manifest inside
      std::string manifest = json["__metadata__"]["shardopt"].get<std::string>();
      if (seed % 4 == 2) {
        manifest = mutated_text(manifest, random);
      } else {
        Json value = Json::parse(manifest);
        mutate_value(value, random);
        manifest = dumped(value);
      }
      json["__metadata__"]["shardopt"] = manifest;
      text = dumped(json);
      same = true;  // the tensors stand where the header says, whatever the manifest
    }
    CAPTURE(seed, text);
    judge.files.bytes(path) = with_header(whole, text, random() % 8 == 0 ? random() : text.size());
    REQUIRE(judge.fault_of_load(path, same) == "");
  }
  CHECK(judge.loaded > 10);
  CHECK(judge.refused > 500);
  CHECK(judge.largest < 8);
}
