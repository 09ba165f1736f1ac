// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What every build computes, to be compared bit by bit: awkward inputs, a hash of each result, and the
/// comparison with the committed lines (golden.txt). An engine, the host's (host.cpp) or the device's
/// (device.cu), does the arithmetic.

#include <shardopt/core/config.hpp>
#include <shardopt/core/math.hpp>
#include <shardopt/rules/adam.hpp>
#include <shardopt/rules/adamw.hpp>
#include <shardopt/rules/fields.hpp>
#include <shardopt/rules/sgd.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../unit/core/awkward_floats.hpp"

namespace bits {

/// FNV-1a of 64 bits. Every NaN counts as the same one.
class Hash {
 public:
  void add(std::uint64_t value, int bytes) {
    for (int k = 0; k < bytes; ++k) value_ = (value_ ^ ((value >> (8 * k)) & 0xffU)) * 0x100000001b3ULL;
  }
  void add(const std::vector<float>& values) {
    for (const float value : values)
      add(awkward::is_nan(value) ? 0x7fc00000U : std::bit_cast<std::uint32_t>(value), 4);
  }
  void add(const std::vector<double>& values) {
    for (const double value : values) {
      add(awkward::is_nan(value) ? 0x7ff8000000000000ULL : std::bit_cast<std::uint64_t>(value), 8);
    }
  }
  void add(const std::vector<std::uint16_t>& values) {
    for (const std::uint16_t value : values) add(value, 2);
  }
  [[nodiscard]] std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325ULL;
};

/// The hash of some values as text.
template <class T>
std::string hash_of(const std::vector<T>& values) {
  Hash hash;
  hash.add(values);
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash.value()));
  return text;
}

inline constexpr std::size_t elements = 2003;  // prime, so that the last pack is partial
inline constexpr std::uint64_t steps = 10;

/// Numbers of every kind, a third of them any bits at all.
inline std::vector<float> awkward_numbers(std::size_t count, std::uint64_t seed) {
  awkward::Random random(seed);
  const std::vector<float> specials = awkward::specials();
  std::vector<float> result(count);
  for (std::size_t k = 0; k < count; ++k) {
    const std::uint32_t kind = random.bits32() % 9;
    result[k] = kind == 0  ? specials[random.bits32() % specials.size()]
                : kind < 3 ? random.any()
                           : random.usual();
  }
  return result;
}

inline std::vector<double> awkward_doubles(std::size_t count, std::uint64_t seed) {
  awkward::Random random(seed);
  std::vector<double> result(count);
  for (double& value : result) {
    std::uint64_t pattern = random.bits64();
    if (random.bits32() % 3 != 0) {  // of usual size
      pattern = (pattern & 0x800fffffffffffffULL) | ((1003U + (pattern >> 52) % 40U) << 52);
    }
    value = std::bit_cast<double>(pattern);
  }
  return result;
}

/// Parameters, gradients of each step and learning-rate factors. Half of the elements never meet a number
/// that is not finite.
struct Inputs {
  std::vector<float> parameters;
  std::vector<std::vector<float>> gradients;
  std::vector<float> factors;
};

inline Inputs inputs() {
  Inputs result;
  result.parameters = awkward_numbers(elements, 1);
  for (std::uint64_t t = 0; t < steps; ++t) {
    result.gradients.push_back(awkward_numbers(elements, 100 + t));
    result.factors.push_back(
        std::bit_cast<float>(0x3f800000U - static_cast<std::uint32_t>(t % 4) * 0x123457U));
  }
  awkward::Random random(2);
  for (std::size_t k = 0; k < elements; k += 2) {
    result.parameters[k] = random.usual();
    for (auto& gradients : result.gradients) gradients[k] = random.bits32() % 8 == 0 ? 0.0f : random.usual();
    if (k % 16 == 0) {  // tiny: squares that are subnormal or vanish
      for (auto& gradients : result.gradients) {
        gradients[k] =
            std::bit_cast<float>((random.bits32() & 0x807fffffU) | ((60U + random.bits32() % 12U) << 23));
      }
    }
  }
  return result;
}

/// All rules with hyper-parameters that use every term.
template <class Visitor>
void for_each_rule(Visitor&& visit) {
  namespace so = shardopt;
  visit("sgd", so::SGD{.lr = 0.05, .weight_decay = 0.01});
  visit("sgd.momentum", so::SGD{.lr = 0.05, .momentum = 0.9, .dampening = 0.3, .weight_decay = 0.01});
  visit("sgd.nesterov", so::SGD{.lr = 0.05, .momentum = 0.9, .nesterov = true, .maximize = true});
  visit("adam", so::Adam{.lr = 0.01, .weight_decay = 0.1});
  visit("adam.small_betas", so::Adam{.lr = 0.01, .beta1 = 0.0, .beta2 = 0.3, .eps = 1e-3, .maximize = true});
  visit("adam_amsgrad", so::AdamAmsgrad{.lr = 0.01, .weight_decay = 0.1});
  visit("adamw", so::AdamW{.lr = 0.01, .weight_decay = 0.1});
  visit("adamw.plain", so::AdamW{.weight_decay = 0.0});
  visit("adamw_amsgrad",
        so::AdamWAmsgrad{.lr = 0.01, .beta1 = 0.8, .beta2 = 0.99, .eps = 0.0, .maximize = true});
}

/// What a rule made of the parameters and its state.
template <class Rule>
struct Updated {
  std::vector<float> parameters;
  std::array<std::vector<float>, shardopt::state_count<Rule>> state;

  explicit Updated(const Inputs& from) : parameters(from.parameters) {
    for (auto& buffer : state) buffer.assign(parameters.size(), 0.0f);
  }
};

/// Every operation on floats or packs of them.
inline constexpr std::size_t operation_count = 18;
template <class V>
SHARDOPT_RULE void operations(V a, V b, V c, V (&out)[operation_count]) noexcept {
  namespace math = shardopt::math;
  out[0] = math::add(a, b);
  out[1] = math::sub(a, b);
  out[2] = math::mul(a, b);
  out[3] = math::div(a, b);
  out[4] = math::fma(a, b, c);
  out[5] = math::sqrt(a);
  out[6] = math::abs(a);
  out[7] = math::neg(a);
  out[8] = math::copysign(a, b);
  out[9] = math::maximum(a, b);
  out[10] = math::minimum(a, b);
  out[11] = math::select(math::less(a, b), a, c);
  out[12] = math::select(math::less_equal(a, b), a, c);
  out[13] = math::select(math::logical_not(math::equal(a, b)), a, c);
  out[14] = math::select(math::logical_and(math::greater(a, b), math::is_finite(a)), a, c);
  out[15] = math::select(math::logical_or(math::greater_equal(a, b), math::is_nan(a)), a, c);
  out[16] = math::add(math::mul(a, c), b);  // must not become a fused operation
  out[17] = math::sub(math::add(c, a), c);  // must not become a
}

/// Every operation on doubles, and the conversions between the two.
inline constexpr std::size_t double_operation_count = 15;
SHARDOPT_HD inline void double_operations(double a, double b, double c,
                                          double (&out)[double_operation_count]) noexcept {
  namespace math = shardopt::math;
  out[0] = math::add(a, b);
  out[1] = math::sub(a, b);
  out[2] = math::mul(a, b);
  out[3] = math::div(a, b);
  out[4] = math::fma(a, b, c);
  out[5] = math::sqrt(a);
  out[6] = math::copysign(math::abs(a), math::neg(b));
  out[7] = math::maximum(a, b);
  out[8] = math::minimum(a, b);
  out[9] = math::select(math::less(a, b), a, c);
  out[10] = math::select(math::less_equal(a, b), a, math::equal(a, a) ? b : c);
  out[11] = math::select(math::is_finite(a), a, math::is_nan(a) ? b : c);
  out[12] = math::widen(math::narrow(a));
  out[13] = math::pow(math::narrow(a), 1000003);
  out[14] = math::add(math::mul(a, c), b);
}

/// All results of an engine: `name hash` lines.
template <class Engine>
std::vector<std::string> lines(Engine& engine) {
  std::vector<std::string> result;
  const auto put = [&](const std::string& name, const auto& values) {
    result.push_back(name + " " + hash_of(values));
  };

  const std::vector<float> a = awkward_numbers(elements, 11);
  const std::vector<float> b = awkward_numbers(elements, 12);
  const std::vector<float> c = awkward_numbers(elements, 13);
  for (std::size_t k = 0; k < operation_count; ++k)
    put("operation." + std::to_string(k), engine.operation(k, a, b, c));
  const std::vector<double> x = awkward_doubles(elements, 21);
  const std::vector<double> y = awkward_doubles(elements, 22);
  const std::vector<double> z = awkward_doubles(elements, 23);
  for (std::size_t k = 0; k < double_operation_count; ++k) {
    put("double_operation." + std::to_string(k), engine.double_operation(k, x, y, z));
  }

  std::vector<std::uint16_t> patterns(0x10000);
  for (std::size_t k = 0; k < patterns.size(); ++k) patterns[k] = static_cast<std::uint16_t>(k);
  std::vector<float> numbers = awkward_numbers(40001, 31);
  awkward::Random random(32);
  for (std::size_t k = 0; k < numbers.size(); k += 2) {  // ties of either format and their neighbours
    const std::uint32_t pattern = random.bits32();
    numbers[k] = std::bit_cast<float>(k % 4 == 0 ? (pattern & 0xffff0000U) | (0x7fffU + pattern % 3U)
                                                 : (pattern & 0xbfffe000U) | (0x0fffU + pattern % 3U));
  }
  put("bf16.to_float", engine.template up<shardopt::bf16>(patterns));
  put("fp16.to_float", engine.template up<shardopt::fp16>(patterns));
  put("bf16.from_float", engine.template down<shardopt::bf16>(numbers));
  put("fp16.from_float", engine.template down<shardopt::fp16>(numbers));

  const Inputs from = inputs();
  for_each_rule([&](const std::string& name, const auto& rule) {
    const auto updated = engine.run(rule, from);
    put(name + ".parameter", updated.parameters);
    using Rule = std::remove_cvref_t<decltype(rule)>;
    for (std::size_t k = 0; k < updated.state.size(); ++k) {
      put(name + "." + std::string(shardopt::state_names<Rule>[k]), updated.state[k]);
    }
  });
  return result;
}

/// Prints the lines, or compares them with those of a file, which may hold more where `all` is false. The
/// exit code of the program.
inline int report(const std::vector<std::string>& computed, const std::string& golden_path, bool all = true) {
  if (golden_path.empty()) {
    for (const std::string& line : computed) std::cout << line << '\n';
    return 0;
  }
  std::ifstream file(golden_path);
  std::vector<std::string> golden;
  for (std::string line; std::getline(file, line);) golden.push_back(line);
  int different = 0;
  if (all && golden.size() != computed.size()) {
    ++different;
    std::cout << golden.size() << " lines expected, " << computed.size() << " computed\n";
  }
  for (const std::string& line : computed) {
    if (std::find(golden.begin(), golden.end(), line) != golden.end()) continue;
    ++different;
    std::cout << "not as expected: " << line << '\n';
  }
  std::cout << computed.size() << " hashes, " << different << " different\n";
  return different == 0 ? 0 : 1;
}

}  // namespace bits
