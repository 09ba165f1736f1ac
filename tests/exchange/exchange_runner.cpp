// SPDX-License-Identifier: Apache-2.0
//
// Trains as exchange_test.py says: on several ranks, from given parameters or a checkpoint, with given
// gradients.
//
// Standard input holds lines, then binary floats. The lines: `group NAME HYPER-PARAMETER=VALUE …`,
// `parameter NAME GROUP DIMENSION …`, `frozen NAME DIMENSION …`, `alias NAME OF`, and last
// `run RULE RANKS STEPS LOAD SAVE`: a checkpoint to begin with, or - and then the parameters are the first
// floats; a folder to save into at the end, with SAVE.safetensors, merged, beside it, or -. Then, for each
// step, the gradient. All trainable parameters stand one behind the other, in table order; so does standard
// output, as it is at the beginning and after each step.

#include <shardopt/checkpoint.hpp>
#include <shardopt/shardopt.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace so = shardopt;

namespace {

std::vector<float> floats(std::int64_t count) {
  std::vector<float> values(static_cast<std::size_t>(count));
  std::cin.read(reinterpret_cast<char*>(values.data()),
                static_cast<std::streamsize>(values.size() * sizeof(float)));
  if (!std::cin) throw std::runtime_error("the input ends too early");
  return values;
}

/// What the lines say.
struct Case {
  so::ParameterTable table;
  std::map<std::string, std::map<std::string, double>> groups;
  std::vector<std::string> order;  ///< of the groups
  std::int64_t elements = 0;       ///< of the flat buffers
  std::string rule;
  int ranks = 0;
  int steps = 0;
  std::string load;
  std::string save;

  Case() {
    for (std::string text; std::getline(std::cin, text);) {
      std::istringstream line(text);
      std::string kind;
      std::string name;
      line >> kind >> name;
      if (kind == "run") {
        rule = name;
        line >> ranks >> steps >> load >> save;
        return;
      }
      if (kind == "group") read_group(name, line);
      if (kind == "parameter" || kind == "frozen") read_parameter(name, kind == "frozen", line);
      if (kind == "alias") read_alias(name, line);
    }
    throw std::runtime_error("no line says what to run");
  }

 private:
  void read_group(const std::string& name, std::istream& line) {
    order.push_back(name);
    for (std::string word; line >> word;) {
      const auto equals = word.find('=');
      groups[name][word.substr(0, equals)] = std::stod(word.substr(equals + 1));
    }
  }

  void read_parameter(const std::string& name, bool frozen, std::istream& line) {
    std::string group = "default";
    if (!frozen) line >> group;
    std::vector<std::int64_t> dimensions;
    for (std::int64_t dimension = 0; line >> dimension;) dimensions.push_back(dimension);
    const so::Shape shape(dimensions);
    table.add({.name = name, .shape = shape, .offset = elements, .group = group, .frozen = frozen});
    elements += shape.numel() + 5;  // a gap
  }

  void read_alias(const std::string& name, std::istream& line) {
    std::string of;
    line >> of;
    table.add({.name = name, .shape = table[table.id_of(of)].shape, .alias_of = of});
  }
};

/// Calls `copy` with the place of each trainable element in the flat buffers, and among all without gaps.
template <class Copy>
void for_each_element(const so::ParameterTable& table, const Copy& copy) {
  for (const auto& entry : table.entries()) {
    for (std::int64_t k = 0; k < entry.flat.size(); ++k)
      copy(static_cast<std::size_t>(entry.offset + k), static_cast<std::size_t>(entry.flat.begin + k));
  }
}

template <class Rule>
Rule rule_with(const std::map<std::string, double>& values) {
  Rule rule{};
  std::size_t at = 0;
  so::for_each_field(rule, [&](auto& field) {
    const auto found = values.find(std::string(so::hyper_parameter_names<Rule>[at++]));
    if (found != values.end()) field = static_cast<std::remove_reference_t<decltype(field)>>(found->second);
  });
  return rule;
}

template <class Rule>
void run(const Case& c) {
  using Comm = so::Threads<so::Host>;
  using Optimizer = so::ZeroOptimizer<Rule, so::FlatSharding, Comm, so::Mixed<float, float, float>>;
  const std::int64_t trainable = c.table.trainable_elements();
  const std::vector<float> initial =
      c.load == "-" ? floats(trainable) : std::vector<float>(static_cast<std::size_t>(trainable));
  std::vector<std::vector<float>> gradients;
  for (int step = 0; step < c.steps; ++step) gradients.push_back(floats(trainable));
  typename Optimizer::Config config{.groups = {}};
  for (const std::string& name : c.order) config.groups.push_back({name, rule_with<Rule>(c.groups.at(name))});
  config.sharding.bucket_bytes = 1024;

  Comm::run(c.ranks, [&](Comm comm) {
    const int rank = comm.rank();
    std::vector<float> parameters(static_cast<std::size_t>(c.elements));
    std::vector<float> gradient(static_cast<std::size_t>(c.elements));
    for_each_element(c.table,
                     [&](std::size_t flat, std::size_t packed) { parameters[flat] = initial[packed]; });
    Optimizer optimizer(c.table, config, std::move(comm), so::FlatBuffers{parameters.data(), gradient.data()},
                        {});
    const auto write = [&] {
      optimizer.wait_parameters({});
      if (rank != 0) return;
      std::vector<float> row(initial.size());
      for_each_element(c.table,
                       [&](std::size_t flat, std::size_t packed) { row[packed] = parameters[flat]; });
      std::cout.write(reinterpret_cast<const char*>(row.data()),
                      static_cast<std::streamsize>(row.size() * sizeof(float)));
    };
    if (c.load != "-") static_cast<void>(so::checkpoint::load(optimizer, c.load, {}, {}));
    write();
    for (int step = 0; step < c.steps; ++step) {
      std::fill(gradient.begin(), gradient.end(), 0.0F);
      if (rank == step % c.ranks) {  // the sum over the ranks is what was given, to the bit
        const std::vector<float>& given = gradients[static_cast<std::size_t>(step)];
        for_each_element(c.table,
                         [&](std::size_t flat, std::size_t packed) { gradient[flat] = given[packed]; });
      }
      static_cast<void>(optimizer.step({}, {}));
      write();
    }
    if (c.save == "-") return;
    const auto report = so::checkpoint::save(optimizer, c.save, {}, {});
    if (rank == 0) {
      static_cast<void>(so::checkpoint::merge(so::checkpoint::Checkpoint(report.generation),
                                              c.save + ".safetensors", {.overwrite = true}));
    }
  });
}

}  // namespace

int main() try {
  std::ios::sync_with_stdio(false);
  const Case c;
  if (c.rule == "sgd") {
    run<so::SGD>(c);
  } else if (c.rule == "adam") {
    run<so::Adam>(c);
  } else if (c.rule == "adamw") {
    run<so::AdamW>(c);
  } else if (c.rule == "adamw_amsgrad") {
    run<so::AdamWAmsgrad>(c);
  } else {
    throw std::runtime_error("unknown rule " + c.rule);
  }
  return 0;
} catch (const std::exception& error) {
  std::cerr << "exchange_runner: " << error.what() << '\n';
  return 1;
}
