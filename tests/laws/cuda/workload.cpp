// SPDX-License-Identifier: Apache-2.0
#include <laws/cuda/workload.hpp>

#include <cmath>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace test {
namespace {

void add(Workload& workload, so::ParameterInfo info, std::int64_t gap) {
  workload.extent += gap;
  if (info.alias_of.empty()) {
    info.offset = workload.extent;
    workload.extent += info.shape.numel();
  }
  workload.parameters.push_back(std::move(info));
}

std::uint32_t bits_of(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

bool same(float a, float b) { return bits_of(a) == bits_of(b) || (std::isnan(a) && std::isnan(b)); }

std::string text_of(float value) {
  std::ostringstream text;
  text << value << " (0x" << std::hex << bits_of(value) << ")";
  return text.str();
}

std::int64_t size_of_type(so::Dtype type) { return static_cast<std::int64_t>(so::size_of(type)); }

std::string compare_bytes(const std::vector<std::byte>& a, const std::vector<std::byte>& b, so::Dtype type) {
  if (a == b) return "";
  if (a.size() != b.size()) return "the sizes differ";
  const auto count = static_cast<std::int64_t>(a.size()) / size_of_type(type);
  for (std::int64_t k = 0; k < count; ++k) {
    const auto at = static_cast<std::size_t>(k * size_of_type(type));
    const bool equal = std::memcmp(a.data() + at, b.data() + at, so::size_of(type)) == 0;
    if (equal || (type == so::Dtype::fp32 && same(element(a, type, k), element(b, type, k)))) continue;
    return "element " + std::to_string(k) + ": " + text_of(element(a, type, k)) + " and " +
           text_of(element(b, type, k));
  }
  return "";
}

std::string compare_results(const so::StepResult& a, const so::StepResult& b) {
  std::ostringstream text;
  if (a.iteration != b.iteration) text << " iteration " << a.iteration << " and " << b.iteration;
  if (a.updates != b.updates) text << " updates " << a.updates << " and " << b.updates;
  if (std::memcmp(&a.norm, &b.norm, sizeof a.norm) != 0 && !(std::isnan(a.norm) && std::isnan(b.norm))) {
    text.precision(17);
    text << " norm " << a.norm << " and " << b.norm;
  }
  if (!same(a.clip_factor, b.clip_factor))
    text << " clip_factor " << a.clip_factor << " and " << b.clip_factor;
  if (a.non_finite != b.non_finite) text << " non_finite " << a.non_finite << " and " << b.non_finite;
  if (a.skipped != b.skipped) text << " skipped " << a.skipped << " and " << b.skipped;
  if (!same(a.loss_scale, b.loss_scale)) text << " loss_scale " << a.loss_scale << " and " << b.loss_scale;
  if (a.inputs_differ != b.inputs_differ)
    text << " inputs_differ " << a.inputs_differ << " and " << b.inputs_differ;
  return text.str();
}

std::string compare_ranks(const RankOutcome& a, const RankOutcome& b, const ElementTypes& types) {
  if (a.results.size() != b.results.size()) return "the numbers of steps differ";
  for (std::size_t step = 0; step < a.results.size(); ++step) {
    const auto at = [&](const char* what) { return "step " + std::to_string(step) + ": " + what; };
    if (const auto text = compare_results(a.results[step], b.results[step]); !text.empty())
      return at("result:") + text;
    if (const auto text = compare_bytes(a.gradients[step], b.gradients[step], types.gradient);
        !text.empty()) {
      return at("gradients: ") + text;
    }
    if (const auto text = compare_bytes(a.parameters[step], b.parameters[step], types.parameter);
        !text.empty()) {
      return at("parameters: ") + text;
    }
  }
  if (a.owned != b.owned) return "the owned parts differ";
  if (a.states.size() != b.states.size()) return "the state buffers differ in number";
  for (const auto& [name, values] : a.states) {
    const auto& others = b.states.at(name);
    if (values.size() != others.size()) return "state " + name + ": the sizes differ";
    for (std::size_t k = 0; k < values.size(); ++k) {
      if (same(values[k], others[k])) continue;
      return "state " + name + ", element " + std::to_string(k) + ": " + text_of(values[k]) + " and " +
             text_of(others[k]);
    }
  }
  return "";
}

const so::ParameterInfo& info_of(const Workload& workload, const std::string& name) {
  for (const auto& info : workload.parameters) {
    if (info.name == name) return info;
  }
  throw std::logic_error("no parameter " + name);
}

}  // namespace

Workload awkward(int world) {
  Workload w{.name = "awkward", .world = world};
  add(w, {.name = "three", .shape = {3}, .group = "decay"}, 1);
  add(w, {.name = "five", .shape = {5}, .group = "plain"}, 0);
  add(w, {.name = "frozen", .shape = {7, 3}, .group = "plain", .frozen = true}, 0);
  add(w, {.name = "scalar", .shape = {}, .group = "plain"}, 2);
  add(w, {.name = "empty", .shape = {4, 0}, .group = "decay"}, 0);
  add(w, {.name = "grain + 1", .shape = {257}, .group = "decay"}, 0);
  add(w, {.name = "tied", .shape = {257}, .alias_of = "grain + 1"}, 0);
  add(w, {.name = "grain - 1", .shape = {5, 51}, .group = "fast"}, 0);
  add(w, {.name = "world + 1", .shape = {world + 1}, .group = "plain"}, 5);
  add(w, {.name = "tile + 1", .shape = {3, 683}, .group = "decay"}, 0);
  add(w, {.name = "prime", .shape = {1021}, .group = "fast"}, 0);
  add(w, {.name = "last", .shape = {64, 9}, .group = "plain"}, 3);
  w.extent += 9;
  return w;
}

Workload dense(int world) {
  Workload w{.name = "dense", .world = world};
  w.bucket_bytes = static_cast<std::int64_t>(world) * 256 * 4;
  add(w, {.name = "first", .shape = {300}, .group = "decay"}, 0);
  add(w, {.name = "second", .shape = {world, 256}, .group = "plain"}, 0);
  add(w, {.name = "third", .shape = {world, 300}, .group = "fast"}, 0);
  add(w, {.name = "tail", .shape = {101}, .group = "decay"}, 0);
  return w;
}

Workload tiny(int world) {
  Workload w{.name = "tiny", .world = world};
  add(w, {.name = "a", .shape = {1}, .group = "plain"}, 0);
  add(w, {.name = "b", .shape = {2}, .group = "decay"}, 1);
  w.steps = 3;
  w.infinite_step = 1;
  return w;
}

Workload sized(int world, const std::vector<std::int64_t>& sizes) {
  Workload w{.name = "sized", .world = world};
  for (const std::int64_t size : sizes) {
    add(w,
        {.name = std::string("p").append(std::to_string(w.parameters.size())),
         .shape = {size},
         .group = "plain"},
        0);
  }
  w.steps = 1;
  w.infinite_step = w.zero_step = w.discarded_step = -1;
  w.max_norm = std::numeric_limits<float>::infinity();
  w.unscaled = true;
  return w;
}

so::ParameterTable table_of(const Workload& workload, void* parameters, void* gradients,
                            const ElementTypes& types) {
  so::ParameterTable table;
  for (so::ParameterInfo info : workload.parameters) {
    if (workload.separate && info.alias_of.empty()) {
      const std::int64_t at = info.offset->value();
      info.parameter = static_cast<std::byte*>(parameters) + at * size_of_type(types.parameter);
      info.gradient =
          info.frozen ? nullptr : static_cast<std::byte*>(gradients) + at * size_of_type(types.gradient);
      info.offset.reset();
    }
    table.add(info);
  }
  return table;
}

float noise(std::uint64_t a, std::uint64_t b, std::uint64_t c, std::uint64_t d) {
  std::uint64_t state = 0x243f6a8885a308d3U;
  for (const std::uint64_t word : {a, b, c, d}) {
    state ^= word + 0x9e3779b97f4a7c15U + (state << 6) + (state >> 2);
    state *= 0xd6e8feb86659fd93U;
    state ^= state >> 32;
  }
  return static_cast<float>(static_cast<std::int32_t>(state >> 32)) / 2147483904.0f;
}

float initial_parameter(const Workload& workload, std::int64_t offset) {
  if (workload.given_parameter) return workload.given_parameter(offset);
  return noise(workload.seed, 1, 0, static_cast<std::uint64_t>(offset));
}

float gradient(const Workload& workload, int step, int rank, std::int64_t offset) {
  if (workload.given_gradient) return workload.given_gradient(step, rank, offset);
  if (step == workload.zero_step) return 0.0f;
  const auto s = static_cast<std::uint64_t>(step);
  const auto at = static_cast<std::uint64_t>(offset);
  if (step == workload.infinite_step && rank == workload.world / 2) {
    const auto& last = workload.parameters.back();
    if (offset == last.offset->value()) return std::numeric_limits<float>::infinity();
  }
  const float value = noise(workload.seed, 2 + s, static_cast<std::uint64_t>(rank) + 1, at);
  const float small = at % 7 == 3 ? 1e-3f : at % 11 == 5 ? 3e-6f : 1.0f;
  return workload.magnitude * small * value;
}

float lr_factor(const Workload& workload, int step) {
  return workload.unscaled ? 1.0f : 1.0f / (1.0f + 0.37f * static_cast<float>(step));
}

float gradient_scale(const Workload& workload, int step) {
  if (workload.unscaled) return 1.0f;
  return step % 3 == 1
             ? 0.125f
             : 1.0f /
                   static_cast<float>(3 * (workload.scaled_for > 0 ? workload.scaled_for : workload.world));
}

std::vector<Place> places(const Workload& workload) {
  std::vector<Place> kinds(static_cast<std::size_t>(workload.extent), Place::gap);
  for (const auto& info : workload.parameters) {
    if (!info.alias_of.empty()) continue;
    const std::int64_t at = info.offset->value();
    for (std::int64_t k = at; k < at + info.shape.numel(); ++k) {
      kinds[static_cast<std::size_t>(k)] = info.frozen ? Place::frozen : Place::trainable;
    }
  }
  return kinds;
}

float element(const std::vector<std::byte>& bytes, so::Dtype type, std::int64_t index) {
  const std::byte* at = bytes.data() + index * size_of_type(type);
  if (type == so::Dtype::fp32) {
    float value = 0;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  if (type == so::Dtype::bf16) {
    so::bf16 value{};
    std::memcpy(&value, at, sizeof value);
    return so::to_float(value);
  }
  so::fp16 value{};
  std::memcpy(&value, at, sizeof value);
  return so::to_float(value);
}

std::string difference(const Outcome& a, const Outcome& b, const ElementTypes& types) {
  if (a.size() != b.size()) return "the numbers of ranks differ";
  for (std::size_t rank = 0; rank < a.size(); ++rank) {
    const std::string text = compare_ranks(a[rank], b[rank], types);
    if (!text.empty()) return "rank " + std::to_string(rank) + ", " + text;
  }
  return "";
}

std::string foreign_writes(const Workload& workload, const Outcome& outcome, const ElementTypes& types) {
  const std::vector<Place> kinds = places(workload);
  for (std::size_t rank = 0; rank < outcome.size(); ++rank) {
    const RankOutcome& r = outcome[rank];
    if (!r.guard_fault.empty()) return "rank " + std::to_string(rank) + ": " + r.guard_fault;
    std::vector<bool> own(kinds.size(), false);
    for (const auto& part : r.owned) {
      const std::int64_t base = info_of(workload, part.name).offset->value();
      for (std::int64_t k = part.range.begin; k < part.range.end; ++k)
        own[static_cast<std::size_t>(base + k)] = true;
    }
    const std::vector<std::byte>& first = r.initial;
    for (std::size_t step = 0; step < r.results.size(); ++step) {
      for (std::size_t k = 0; k < kinds.size(); ++k) {
        const auto differs = [&](const auto& x, const auto& y, so::Dtype type) {
          return std::memcmp(x.data() + k * so::size_of(type), y.data() + k * so::size_of(type),
                             so::size_of(type)) != 0;
        };
        const auto at = [&](const char* what) {
          return "rank " + std::to_string(rank) + ", step " + std::to_string(step) + ": " + what +
                 " at element " + std::to_string(k);
        };
        if (kinds[k] != Place::trainable && differs(r.parameters[step], first, types.parameter)) {
          return at("a parameter's gap or a frozen one was written");
        }
        if (!own[k] && differs(r.gradients[step], r.written[step], types.gradient)) {
          return at("a gradient that is not owned was written");
        }
      }
    }
  }
  return "";
}

std::vector<std::vector<float>> reduced_gradients(const Workload& workload, const Outcome& outcome,
                                                  const ElementTypes& types) {
  std::vector<std::vector<float>> result;
  for (std::size_t step = 0; step < outcome.front().results.size(); ++step) {
    std::vector<float> whole(static_cast<std::size_t>(workload.extent), 0.0f);
    for (const RankOutcome& rank : outcome) {
      for (const auto& part : rank.owned) {
        const std::int64_t base = info_of(workload, part.name).offset->value();
        for (std::int64_t k = base + part.range.begin; k < base + part.range.end; ++k) {
          whole[static_cast<std::size_t>(k)] = element(rank.gradients[step], types.gradient, k);
        }
      }
    }
    result.push_back(std::move(whole));
  }
  return result;
}

std::map<std::string, std::vector<float>> whole_states(const Workload& workload, const Outcome& outcome) {
  std::map<std::string, std::vector<float>> result;
  for (const RankOutcome& rank : outcome) {
    for (const auto& [name, values] : rank.states) {
      std::vector<float>& whole = result[name];
      whole.resize(static_cast<std::size_t>(workload.extent), 0.0f);
      std::size_t at = 0;
      for (const auto& part : rank.owned) {
        const std::int64_t base = info_of(workload, part.name).offset->value();
        for (std::int64_t k = base + part.range.begin; k < base + part.range.end; ++k) {
          whole[static_cast<std::size_t>(k)] = values.at(at++);
        }
      }
    }
  }
  return result;
}

}  // namespace test
