// SPDX-License-Identifier: Apache-2.0
//
// Runs the library's rules on what torch_oracle.py sends, so that it can compare them with PyTorch's.
//
// Standard input holds cases one after another: a line `rule elements steps name=value ...`, then binary
// floats: the parameters, and for each step the learning-rate factor and the gradients. Standard output gets,
// for each step, the parameters and then each state buffer, as binary floats.

#include <shardopt/core/float_environment.hpp>
#include <shardopt/core/math.hpp>
#include <shardopt/core/pack_memory.hpp>
#include <shardopt/rules/adam.hpp>
#include <shardopt/rules/adamw.hpp>
#include <shardopt/rules/fields.hpp>
#include <shardopt/rules/sgd.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace so = shardopt;

namespace {

void read(std::vector<float>& values) {
  std::cin.read(reinterpret_cast<char*>(values.data()),
                static_cast<std::streamsize>(values.size() * sizeof(float)));
  if (!std::cin) throw std::runtime_error("the input ends in the middle of a case");
}

void write(const std::vector<float>& values) {
  std::cout.write(reinterpret_cast<const char*>(values.data()),
                  static_cast<std::streamsize>(values.size() * sizeof(float)));
}

/// The settings of a case; each must be used.
class Settings {
 public:
  explicit Settings(std::istream& line) {
    for (std::string word; line >> word;) {
      const auto equals = word.find('=');
      if (equals == std::string::npos) throw std::runtime_error("not a setting: " + word);
      values_[word.substr(0, equals)] = std::stod(word.substr(equals + 1));
    }
  }
  double take(const std::string& name) {
    const auto found = values_.find(name);
    if (found == values_.end()) throw std::runtime_error("missing setting: " + name);
    const double value = found->second;
    values_.erase(found);
    return value;
  }
  bool take_flag(const std::string& name) { return take(name) > 0.5; }
  void end() const {
    if (!values_.empty()) throw std::runtime_error("unknown setting: " + values_.begin()->first);
  }

 private:
  std::map<std::string, double> values_;
};

template <class Rule>
using State = std::array<std::vector<float>, so::state_count<Rule>>;

/// One update of all elements, by packs where the host has them.
template <class Rule, std::size_t... index>
SHARDOPT_TARGET_AVX2 void update(const typename Rule::Constants& constants, std::vector<float>& parameters,
                                 const std::vector<float>& gradients, State<Rule>& buffers,
                                 std::index_sequence<index...>) {
#if SHARDOPT_HOST_AVX2
  for (std::size_t k = 0; k < parameters.size(); k += so::Pack::size) {
    const int count = static_cast<int>((std::min)(parameters.size() - k, std::size_t{so::Pack::size}));
    typename Rule::template State<so::Pack> state{so::load_pack(buffers[index].data() + k, count)...};
    const so::Pack updated =
        Rule::template update<so::Pack>(constants, so::load_pack(parameters.data() + k, count),
                                        so::load_pack(gradients.data() + k, count), state);
    so::store_pack(parameters.data() + k, updated, count);
    (so::store_pack(buffers[index].data() + k, so::field<index>(state), count), ...);
  }
#else
  for (std::size_t k = 0; k < parameters.size(); ++k) {
    typename Rule::template State<float> state{buffers[index][k]...};
    parameters[k] = Rule::template update<float>(constants, parameters[k], gradients[k], state);
    ((buffers[index][k] = so::field<index>(state)), ...);
  }
#endif
}

template <class Rule>
void run(const Rule& rule, std::size_t elements, std::uint64_t steps) {
  so::validate(rule);
  std::vector<float> parameters(elements);
  read(parameters);
  State<Rule> state;
  for (auto& buffer : state) buffer.assign(elements, 0.0f);
  std::vector<float> factor(1);
  std::vector<float> gradients(elements);
  for (std::uint64_t t = 1; t <= steps; ++t) {
    read(factor);
    read(gradients);
    update<Rule>(rule.constants({.lr_factor = factor[0], .update = t}), parameters, gradients, state,
                 std::make_index_sequence<so::state_count<Rule>>{});
    write(parameters);
    for (const auto& buffer : state) write(buffer);
  }
}

template <class Rule>
Rule adam(Settings& settings) {
  const Rule rule{.lr = settings.take("lr"),
                  .beta1 = settings.take("beta1"),
                  .beta2 = settings.take("beta2"),
                  .eps = settings.take("eps"),
                  .weight_decay = settings.take("weight_decay"),
                  .maximize = settings.take_flag("maximize")};
  settings.end();
  return rule;
}

so::SGD sgd(Settings& settings) {
  const so::SGD rule{.lr = settings.take("lr"),
                     .momentum = settings.take("momentum"),
                     .dampening = settings.take("dampening"),
                     .weight_decay = settings.take("weight_decay"),
                     .nesterov = settings.take_flag("nesterov"),
                     .maximize = settings.take_flag("maximize")};
  settings.end();
  return rule;
}

void run_case(const std::string& header) {
  std::istringstream line(header);
  std::string name;
  std::size_t elements = 0;
  std::uint64_t steps = 0;
  if (!(line >> name >> elements >> steps)) throw std::runtime_error("bad header: " + header);
  Settings settings(line);
  if (name == so::rule_name<so::SGD>) return run(sgd(settings), elements, steps);
  if (name == so::rule_name<so::Adam>) return run(adam<so::Adam>(settings), elements, steps);
  if (name == so::rule_name<so::AdamAmsgrad>) return run(adam<so::AdamAmsgrad>(settings), elements, steps);
  if (name == so::rule_name<so::AdamW>) return run(adam<so::AdamW>(settings), elements, steps);
  if (name == so::rule_name<so::AdamWAmsgrad>) return run(adam<so::AdamWAmsgrad>(settings), elements, steps);
  throw std::runtime_error("unknown rule: " + name);
}

}  // namespace

int main() try {
#if SHARDOPT_HOST_AVX2
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    std::cerr << "skipped: this processor has no AVX2 and FMA\n";
    return 77;
  }
#endif
  const so::FloatEnvironment environment;
  for (std::string header; std::getline(std::cin, header);) run_case(header);
  return 0;
} catch (const std::exception& error) {
  std::cerr << "rule_runner: " << error.what() << '\n';
  return 1;
}
