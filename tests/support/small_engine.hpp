// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/threads.hpp>
#include <shardopt/precision/mixed.hpp>
#include <shardopt/rules/adam.hpp>
#include <shardopt/rules/adamw.hpp>
#include <shardopt/rules/sgd.hpp>
#include <shardopt/sharding/flat_sharding.hpp>
#include <shardopt/sharding/per_parameter_sharding.hpp>
#include <shardopt/sharding/replicated.hpp>
#include <shardopt/zero/zero_optimizer.hpp>
#include <support/message_of.hpp>
#include <support/numbers.hpp>

#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

/// A training engine of a few lines for tests that know the numbers: two flat buffers on the host, one
/// optimizer.
namespace test {

inline constexpr std::int64_t grain = 256;

using HostThreads = so::Threads<so::Host>;

template <class Rule, class Precision = so::FullPrecision, class Sharding = so::FlatSharding>
using ThreadsOptimizer = so::ZeroOptimizer<Rule, Sharding, HostThreads, Precision>;

/// A parameter of a table whose tensors lie one behind the other.
struct Packed {
  std::string name;
  so::Shape shape;
  std::string group = "default";
  bool frozen = false;
  std::string alias_of = {};
};

[[nodiscard]] inline so::ParameterTable packed_table(const std::vector<Packed>& tensors) {
  so::ParameterTable table;
  std::int64_t offset = 0;
  for (const Packed& tensor : tensors) {
    so::ParameterInfo info{.name = tensor.name,
                           .shape = tensor.shape,
                           .group = tensor.group,
                           .frozen = tensor.frozen,
                           .alias_of = tensor.alias_of};
    if (tensor.alias_of.empty()) {
      info.offset = offset;
      offset += tensor.shape.numel();
    }
    table.add(info);
  }
  return table;
}

/// A table of tensors of these sizes, one behind the other: "p0", "p1", …
[[nodiscard]] inline so::ParameterTable table_of_sizes(const std::vector<std::int64_t>& sizes) {
  std::vector<Packed> tensors;
  for (const std::int64_t size : sizes)
    tensors.push_back({std::string("p").append(std::to_string(tensors.size())), {size}});
  return packed_table(tensors);
}

[[nodiscard]] inline std::int64_t extent_of(const so::ParameterTable& table) {
  std::int64_t extent = 0;
  for (const auto& entry : table.entries()) extent = std::max(extent, entry.offset + entry.numel);
  return extent;
}

/// One rank: parameters start at one value.
template <class Optimizer>
class Engine {
 public:
  using Param = typename Optimizer::Param;
  using Grad = typename Optimizer::Grad;
  using Config = typename Optimizer::Config;

  template <class Comm>
  Engine(const so::ParameterTable& table, const Config& config, Comm comm, double start = 0)
      : parameters(static_cast<std::size_t>(extent_of(table)), rounded<Param>(start)),
        gradients(parameters.size(), rounded<Grad>(0.0)),
        optimizer(table, config, std::move(comm), so::FlatBuffers{parameters.data(), gradients.data()},
                  so::Host::Stream{}) {}

  /// gradients[i] = f(i), rounded.
  template <class Function>
  void set_gradients(const Function& f) {
    for (std::size_t i = 0; i < gradients.size(); ++i)
      gradients[i] = rounded<Grad>(static_cast<double>(f(static_cast<std::int64_t>(i))));
  }
  void fill_gradients(double value) {
    set_gradients([value](std::int64_t) { return value; });
  }

  so::StepResult step(const so::StepOptions& options = {}) { return optimizer.step(options, {}).get(); }

  [[nodiscard]] double parameter(std::int64_t i) const {
    return value_of(parameters[static_cast<std::size_t>(i)]);
  }
  [[nodiscard]] double gradient(std::int64_t i) const {
    return value_of(gradients[static_cast<std::size_t>(i)]);
  }
  [[nodiscard]] std::vector<double> values() const {
    std::vector<double> result;
    for (const Param p : parameters) result.push_back(value_of(p));
    return result;
  }
  [[nodiscard]] std::vector<float> state(std::string_view name) const {
    const auto span = optimizer.state(name);
    return {span.begin(), span.end()};
  }

  std::vector<Param> parameters;
  std::vector<Grad> gradients;
  Optimizer optimizer;
};

/// Runs body(comm) on every rank of a world of threads and gives what each returned, in rank order.
template <class Body>
[[nodiscard]] auto on_ranks(int world, const Body& body) {
  using Result = decltype(body(std::declval<HostThreads>()));
  static_assert(!std::is_same_v<Result, bool>, "ranks would write bits of one word");
  std::vector<Result> results(static_cast<std::size_t>(world));
  HostThreads::run(world, [&](HostThreads comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    results[rank] = body(std::move(comm));
  });
  return results;
}

/// Runs body(comm) on every rank and gives the message of what each threw.
template <class Error = std::exception, class Body>
[[nodiscard]] std::vector<std::string> messages_of_ranks(int world, const Body& body) {
  return on_ranks(world, [&](HostThreads comm) { return message_of<Error>([&] { body(std::move(comm)); }); });
}

template <class T>
[[nodiscard]] bool all_same(const std::vector<T>& values) {
  for (const T& value : values) {
    if (!(value == values.front())) return false;
  }
  return true;
}

}  // namespace test
