// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/collective.hpp>
#include <shardopt/core/error.hpp>
#include <shardopt/core/parameter_table.hpp>
#include <shardopt/precision/precision_policy.hpp>
#include <shardopt/zero/bucket_buffers.hpp>
#include <shardopt/zero/host_wait.hpp>
#include <shardopt/zero/memory_plan.hpp>
#include <shardopt/zero/shard_layout.hpp>
#include <shardopt/zero/state_gatherer.hpp>
#include <shardopt/zero/state_run.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace shardopt::inline v0::detail {

/// A rank's states as parts of whole parameters: a view.
template <PrecisionPolicy Precision, class State>
class StateAccess {
 public:
  using Buffers = EngineBuffers<typename Precision::Param, typename Precision::Grad>;

  StateAccess(const ShardLayout& layout, const MemoryPlan& plan, const ParameterTable& table,
              const Buffers& buffers, const State& state)
      : layout_(layout), plan_(plan), table_(table), buffers_(buffers), state_(state) {}

  [[nodiscard]] std::vector<StateRun> runs(StateCover cover) const {
    std::vector<StateRun> result;
    for (const auto& buffer : plan_.buffers) {
      append_state_runs(layout_, table_, buffers_, buffer.name, state_.buffer(buffer.name).data(), cover,
                        result);
    }
    if constexpr (!Precision::has_master)
      append_state_runs(layout_, table_, buffers_, "master", nullptr, cover, result);
    return result;
  }

  /// The entry whose state is meant. @throws std::invalid_argument as ZeroOptimizer::set_state does
  [[nodiscard]] const ParameterTable::Entry& entry_of(std::string_view parameter, std::string_view state,
                                                      std::size_t values) const {
    const ParameterTable::Entry& entry = table_[table_.storage_of(table_.id_of(parameter))];
    const std::string what = "state " + in_quotes(state) + " of " + in_quotes(parameter);
    if (entry.frozen)
      throw std::invalid_argument("shardopt: set_state: parameter " + in_quotes(parameter) +
                                  " is frozen: it has no state");
    if (!keeps(state)) throw std::invalid_argument("shardopt: set_state: no " + what + " is kept");
    if (static_cast<std::int64_t>(values) != entry.numel) {
      throw std::invalid_argument("shardopt: set_state: " + what + " has " + std::to_string(entry.numel) +
                                  " elements, not " + std::to_string(values));
    }
    return entry;
  }

  /// @throws std::invalid_argument for a run that is no part of one that this rank keeps
  void require_kept(std::span<const StateRun> given) const {
    std::vector<StateRun> kept = runs(StateCover::kept);
    const std::less<> below;  // of addresses in different buffers, too
    std::sort(kept.begin(), kept.end(),
              [&](const StateRun& a, const StateRun& b) { return below(a.data, b.data); });
    for (const StateRun& run : given) {
      const auto next =
          std::upper_bound(kept.begin(), kept.end(), run.data,
                           [&](const float* data, const StateRun& k) { return below(data, k.data); });
      if (next != kept.begin() && is_part(run, *std::prev(next))) continue;
      throw std::invalid_argument("shardopt: set_states: elements " + std::to_string(run.range.begin) + ".." +
                                  std::to_string(run.range.end) + " of " + in_quotes(run.state) + " of " +
                                  in_quotes(run.parameter) + " are no part of a run of states()");
    }
  }

  /// Enqueues copies of this rank's parts of a whole state from host memory.
  template <class Device>
  void upload(const ParameterTable::Entry& entry, std::string_view state, std::span<const float> values,
              const Device& device, typename Device::Stream stream) const {
    for (const StateRun& run : runs(StateCover::kept)) {
      if (run.state != state || run.parameter.data() != entry.name.data()) continue;
      device.upload(run.data, values.data() + run.range.begin,
                    run.range.size() * static_cast<std::int64_t>(sizeof(float)), stream);
    }
  }

  /// All states on one rank, by state, each in table order; empty on others. Collective; waits.
  template <Collective Comm>
  [[nodiscard]] std::vector<FullState> gather(Comm& comm, int root) const {
    std::vector<std::string_view> names;
    for (const auto& buffer : plan_.buffers) names.emplace_back(buffer.name);
    if (!Precision::has_master) names.emplace_back("master");
    std::vector<FullState> result;
    result.reserve(names.size() * table_.size());  // addresses stay
    for (const std::string_view name : names) {
      std::vector<FullState*> into(table_.size(), nullptr);  // by table entry
      for (std::size_t k = 0; comm.rank() == root && k < table_.size(); ++k) {
        const auto& entry = table_.entries()[k];
        if (entry.frozen || entry.alias_of) continue;
        result.push_back({name, entry.name, std::vector<float>(static_cast<std::size_t>(entry.numel))});
        into[k] = &result.back();
      }
      gather_one(comm, name, root, into);
    }
    return result;
  }

 private:
  [[nodiscard]] static bool is_part(const StateRun& part, const StateRun& whole) {
    return part.state == whole.state && part.parameter == whole.parameter &&
           part.range.begin <= part.range.end && part.range.end <= whole.range.end &&
           part.data - whole.data == part.range.begin - whole.range.begin;
  }

  [[nodiscard]] bool keeps(std::string_view state) const {
    if (!Precision::has_master && state == "master") return true;
    return std::any_of(plan_.buffers.begin(), plan_.buffers.end(),
                       [&](const auto& buffer) { return buffer.name == state; });
  }

  /// A state that every rank has whole is read where the root keeps it, or from its fp32 parameters.
  template <Collective Comm>
  void gather_one(Comm& comm, std::string_view name, int root, std::vector<FullState*>& into) const {
    const bool is_parameter = !Precision::has_master && name == "master";
    if (!is_parameter && !layout_.updates_everything()) {
      gather_sharded_state(comm, layout_, table_, state_.buffer(name).data(), root, into);
      return;
    }
    if (comm.rank() != root) return;
    const auto read = [&](FullState& full, std::int64_t begin, const void* from, std::int64_t count) {
      comm.device().download(full.values.data() + begin, from,
                             count * static_cast<std::int64_t>(sizeof(float)), comm.stream());
    };
    for (std::uint32_t k = 0; is_parameter && k < table_.size(); ++k) {
      if (into[k] != nullptr) read(*into[k], 0, buffers_.parameter(k), table_.entries()[k].numel);
    }
    for (const StateRun& run : runs(StateCover::kept)) {
      if (is_parameter || run.state != name) continue;
      read(*into[table_.id_of(run.parameter).index], run.range.begin, run.data, run.range.size());
    }
  }

  const ShardLayout& layout_;
  const MemoryPlan& plan_;
  const ParameterTable& table_;
  const Buffers& buffers_;
  const State& state_;
};

}  // namespace shardopt::inline v0::detail
