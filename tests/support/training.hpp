// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/zero/zero_optimizer.hpp>
#include <support/guarded_memory.hpp>
#include <support/reference.hpp>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace test {

/// Where the optimizer's memory comes from.
enum class MemoryKind { own, arena, adopted };

/// How a rank runs a workload.
struct RunOptions {
  MemoryKind memory = MemoryKind::own;
  so::Reduction reduction = so::Reduction::automatic;
};

/// What went wrong, on whichever rank; the first few findings.
class Findings {
 public:
  void add(const std::string& text) {
    const std::lock_guard lock(mutex_);
    if (++count_ <= 5) text_ += text + "\n";
  }
  /// Empty if all is well.
  [[nodiscard]] std::string text() const { return text_; }

 private:
  std::mutex mutex_;
  std::string text_;
  int count_ = 0;
};

template <class Optimizer, class Rule>
[[nodiscard]] typename Optimizer::Config config_of(const Settings<Rule>& settings,
                                                   const RunOptions& options) {
  typename Optimizer::Config config;
  config.groups.clear();
  for (const auto& group : settings.groups) config.groups.push_back({group.name, group.rule});
  config.max_norm = settings.max_norm;
  config.clip_epsilon = settings.clip_epsilon;
  config.count_skipped_updates = settings.count_skipped;
  config.reduction = options.reduction;
  return config;
}

/// What one rank holds, and how it compares with the reference after each step: parameters, own gradients,
/// states, results, and everything that must not be written.
template <class Memory, class Rule, class Precision>
class RankState {
 public:
  using Stream = typename Memory::Stream;
  using Param = typename Precision::Param;
  using Grad = typename Precision::Grad;
  using Plain = Reference<Rule, Precision>;

  RankState(const Workload& work, const Plain& plain, int rank, Stream stream, Findings& findings)
      : work_(work),
        plain_(plain),
        places_(plain.places()),
        stream_(stream),
        findings_(findings),
        rank_(rank),
        world_(plain.world()),
        params_(places_.extent, stream, work.misaligned),
        grads_(places_.extent, stream, work.misaligned) {
    for (const Placed& placed : places_.tensors) {
      if (!placed.tensor.alias_of.empty()) continue;
      for (std::int64_t i = 0; i < placed.tensor.numel; ++i)
        at(params_, placed.offset + i) = initial_parameter<Param>(placed.offset + i);
    }
    params_.upload();
  }

 protected:
  template <class Buffer>
  static auto& at(Buffer& buffer, std::int64_t index) {
    return buffer.host[static_cast<std::size_t>(index)];
  }

  void complain(const std::string& what) {
    findings_.add(work_.name + ", rank " + std::to_string(rank_) + " of " + std::to_string(world_) + ": " +
                  what);
  }
  void complain(std::size_t step, const std::string& what) {
    complain("step " + std::to_string(step) + ": " + what);
  }

  /// Memory that the engine gives to the optimizer.
  std::byte* give(std::int64_t bytes, bool pinned = false) {
    given_.emplace_back(bytes, stream_, 0, pinned);
    return given_.back().data();
  }

  /// The flat elements that this rank owns, in the order of its state buffers.
  void find_owned(std::span<const so::OwnedPart> parts, std::int64_t planned) {
    owned_.assign(static_cast<std::size_t>(places_.elements), false);
    for (const so::OwnedPart& part : parts) {
      const auto placed = std::find_if(places_.tensors.begin(), places_.tensors.end(),
                                       [&](const Placed& p) { return p.tensor.name == part.name; });
      if (placed == places_.tensors.end() || !placed->trainable() || part.range.end > placed->tensor.numel) {
        complain("owns a part of " + std::string(part.name) + ", which has no such part");
        continue;
      }
      for (std::int64_t i = part.range.begin; i < part.range.end; ++i) {
        shard_.push_back(placed->flat + i);
        owned_[static_cast<std::size_t>(placed->flat + i)] = true;
      }
    }
    if (!std::is_sorted(shard_.begin(), shard_.end())) complain("owned parts are not in flat order");
    if (static_cast<std::int64_t>(shard_.size()) != planned)
      complain("owned parts are not those of the plan");
  }

  void write_gradients(std::size_t step) {
    grads_.download();
    for (std::int64_t flat = 0; flat < places_.elements; ++flat) {
      at(grads_, places_.memory_of_flat[static_cast<std::size_t>(flat)]) =
          gradient_of<Grad>(work_, step, rank_, world_, flat, places_.elements);
    }
    grads_.upload();
  }

  /// What to announce before a step, in which calls: nothing, all at once, one by one in an order of this
  /// rank's own, half.
  [[nodiscard]] std::vector<std::vector<so::ParameterId>> announcements(std::size_t step) const {
    std::vector<so::ParameterId> ids;
    for (std::uint32_t k = 0; k < places_.tensors.size(); ++k) {
      if (places_.tensors[k].tensor.alias_of.empty()) ids.push_back({k});
    }
    std::vector<std::vector<so::ParameterId>> calls;
    if (step % 4 == 1) calls.push_back(ids);
    if (step % 4 == 2) {
      for (std::size_t k = ids.size(); k > 1; --k) std::swap(ids[k - 1], ids[noise(5, step, rank_, k) % k]);
      for (const so::ParameterId id : ids) calls.push_back({id});
    }
    if (step % 4 == 3)
      calls.emplace_back(ids.begin() + static_cast<std::ptrdiff_t>(ids.size() / 2), ids.end());
    return calls;
  }

  void compare_result(std::size_t step, const so::StepResult& result) {
    const auto& expected = plain_.steps[step];
    std::ostringstream text;
    text.precision(17);
    const auto differ = [&](const char* name, double is, double should) {
      if (!(is == should || (std::isnan(is) && std::isnan(should))))
        text << name << " is " << is << ", not " << should << "; ";
    };
    differ("norm", result.norm, expected.norm);
    differ("clip_factor", static_cast<double>(result.clip_factor), static_cast<double>(expected.clip_factor));
    differ("iteration", static_cast<double>(result.iteration), static_cast<double>(expected.iteration));
    differ("updates", static_cast<double>(result.updates), static_cast<double>(expected.updates));
    differ("non_finite", static_cast<double>(result.non_finite), static_cast<double>(expected.non_finite));
    differ("skipped", result.skipped, expected.skipped);
    differ("inputs_differ", result.inputs_differ, 0);
    if (!text.str().empty()) complain(step, text.str());
  }

  /// Every element of memory: updated where it is trainable, as it was elsewhere.
  void compare_parameters(std::size_t step) {
    std::vector<Param> expected = params_.host;
    for (std::int64_t flat = 0; flat < places_.elements; ++flat) {
      const float master = plain_.steps[step].master[static_cast<std::size_t>(flat)];
      expected[static_cast<std::size_t>(places_.memory_of_flat[static_cast<std::size_t>(flat)])] =
          rounded<Param>(static_cast<double>(master));
    }
    const std::vector<Param> before = params_.host;
    params_.download();
    compare(step, "parameter", params_.host, expected);
    if (plain_.steps[step].skipped) compare(step, "parameter of a skipped step", params_.host, before);
  }

  /// Reduced where this rank owns, as they were elsewhere.
  void compare_gradients(std::size_t step, bool keeps_foreign) {
    std::vector<Grad> expected = grads_.host;
    const std::vector<Grad>& reduced = plain_.steps[step].reduced;
    grads_.download();
    for (std::size_t flat = 0; flat < reduced.size(); ++flat) {
      const auto offset = static_cast<std::size_t>(places_.memory_of_flat[flat]);
      if (owned_[flat]) expected[offset] = reduced[flat];
      if (!owned_[flat] && !keeps_foreign) expected[offset] = grads_.host[offset];
    }
    compare(step, "gradient", grads_.host, expected);
  }

  void compare_zeroed_gradients() {
    std::vector<Grad> expected = grads_.host;
    for (const std::int64_t offset : places_.memory_of_flat)
      expected[static_cast<std::size_t>(offset)] = rounded<Grad>(0.0);
    grads_.download();
    compare(work_.steps.size(), "zeroed gradient", grads_.host, expected);
  }

  /// @param state  device memory; empty if none is kept
  void compare_state(std::size_t step, std::string_view name, std::span<const float> state) {
    const auto& after = plain_.steps[step];
    const auto index =
        static_cast<std::size_t>(std::find(so::state_names<Rule>.begin(), so::state_names<Rule>.end(), name) -
                                 so::state_names<Rule>.begin());
    const std::vector<float>& expected = name == "master" ? after.master : after.states[index];
    std::vector<float> mine(state.size());
    Memory::download(mine.data(), state.data(), static_cast<std::int64_t>(state.size_bytes()), stream_);
    std::vector<float> own;
    for (const std::int64_t flat : shard_) own.push_back(expected[static_cast<std::size_t>(flat)]);
    compare(step, std::string(name), mine, own);
  }

  void compare_guards() {
    const bool intact =
        params_.guards_intact() && grads_.guards_intact() &&
        std::all_of(given_.begin(), given_.end(), [](const auto& memory) { return memory.guards_intact(); });
    if (!intact) complain("memory around a buffer was written");
  }

  const Workload& work_;
  const Plain& plain_;
  const Places& places_;
  Stream stream_;
  Findings& findings_;
  int rank_;
  int world_;
  EngineBuffer<Param, Memory> params_;
  EngineBuffer<Grad, Memory> grads_;
  std::deque<GuardedMemory<Memory>> given_;

 private:
  template <class T>
  void compare(std::size_t step, const std::string& what, const std::vector<T>& is,
               const std::vector<T>& should) {
    if (is.size() != should.size()) return complain(step, what + ": another number of elements");
    for (std::size_t i = 0; i < is.size(); ++i) {
      if (same(is[i], should[i])) continue;
      return complain(
          step, what + " " + std::to_string(i) + " is " + text_of(is[i]) + ", not " + text_of(should[i]));
    }
  }

  std::vector<bool> owned_;
  std::vector<std::int64_t> shard_;
};

/// One rank that trains.
template <class World, class Rule, class Sharding, class Precision>
class Trainee : RankState<typename World::Memory, Rule, Precision> {
 public:
  using Base = RankState<typename World::Memory, Rule, Precision>;
  using Comm = typename World::Comm;
  using Stream = typename Base::Stream;
  using Optimizer = so::ZeroOptimizer<Rule, Sharding, Comm, Precision>;

  Trainee(const Workload& work, const typename Base::Plain& plain, const typename Optimizer::Config& config,
          const RunOptions& options, Comm comm, Stream stream, Findings& findings)
      : Base(work, plain, comm.rank(), stream, findings) {
    start(config, options, std::move(comm));
    this->find_owned(optimizer_->owned(), optimizer_->memory_plan().owned_parameters);
  }

  void train() {
    for (std::size_t step = 0; step < this->work_.steps.size(); ++step) {
      this->write_gradients(step);
      const so::StepTicket ticket = take(step);
      optimizer_->wait_parameters(this->stream_);
      this->compare_result(step, ticket.get());
      this->compare_parameters(step);
      this->compare_gradients(step, World::keeps_foreign_gradients);
      for (const auto& buffer : optimizer_->memory_plan().buffers)
        this->compare_state(step, buffer.name, optimizer_->state(buffer.name));
    }
    optimizer_->zero_gradients(this->stream_);
    this->compare_zeroed_gradients();
    this->compare_guards();
  }

 private:
  void start(const typename Optimizer::Config& config, const RunOptions& options, Comm comm) {
    const so::ParameterTable table =
        table_of(this->work_, this->places_, this->params_.data(), this->grads_.data());
    const bool adopt = options.memory == MemoryKind::adopted;
    const so::MemoryPlan plan =
        Optimizer::plan(table, config, {.rank = this->rank_, .world = this->world_}, adopt);
    typename Optimizer::Memory memory;
    if (options.memory == MemoryKind::arena)
      memory = so::Arena{this->give(plan.device_bytes), this->give(plan.pinned_bytes, true)};
    if (adopt) {
      so::StateBuffers states;
      for (const auto& buffer : plan.buffers)
        states.buffers.emplace_back(buffer.name, reinterpret_cast<float*>(this->give(buffer.bytes)));
      memory = states;
    }
    if (this->work_.separate) {
      optimizer_.emplace(table, config, std::move(comm),
                         so::SeparateBuffers<typename Base::Param, typename Base::Grad>{}, memory,
                         this->stream_);
    } else {
      optimizer_.emplace(table, config, std::move(comm),
                         so::FlatBuffers{this->params_.data(), this->grads_.data()}, memory, this->stream_);
    }
  }

  so::StepTicket take(std::size_t step) {
    for (const auto& ids : this->announcements(step)) optimizer_->gradient_ready(ids, this->stream_);
    const StepPlan& plan = this->work_.steps[step];
    const so::StepOptions sums{.gradient_scale = plan.gradient_scale};
    if (plan.kind == Kind::discarded) {
      optimizer_->reduce(sums, this->stream_);
      return optimizer_->discard(this->stream_);
    }
    if (step % 5 != 3) {
      return optimizer_->step({.lr_factor = plan.lr_factor, .gradient_scale = plan.gradient_scale},
                              this->stream_);
    }
    const so::StepResult early = optimizer_->reduce(sums, this->stream_).get();
    if (early.norm != this->plain_.steps[step].norm && !early.skipped)
      this->complain(step, "reduce() measured another norm");
    return optimizer_->apply({.lr_factor = plan.lr_factor}, this->stream_);
  }

  std::optional<Optimizer> optimizer_;
};

/// Trains on all ranks of a world and says what differs from the reference: nothing, if the library keeps its
/// promises.
template <class World, class Rule, class Sharding, class Precision>
[[nodiscard]] std::string differences(const Workload& work, const Reference<Rule, Precision>& plain,
                                      const Settings<Rule>& settings, const Sharding& sharding, int world,
                                      const RunOptions& options = {}) {
  using Subject = Trainee<World, Rule, Sharding, Precision>;
  auto config = config_of<typename Subject::Optimizer>(settings, options);
  config.sharding = sharding;
  Findings findings;
  World::run(world, [&](typename World::Comm comm, typename World::Memory::Stream stream) {
    Subject subject(work, plain, config, options, std::move(comm), stream, findings);
    subject.train();
  });
  return findings.text();
}

}  // namespace test
