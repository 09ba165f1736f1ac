// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <laws/cuda/cases.hpp>
#include <laws/cuda/workload.hpp>
#include <shardopt/zero/zero_optimizer.hpp>

#include <algorithm>
#include <memory>
#include <span>
#include <utility>

namespace test {

/// Memory that the engine owns, with guards of poison around it. An Engine has Stream, allocate, free, write
/// and read (which waits).
template <class Engine>
class Guarded {
 public:
  static constexpr std::int64_t guard = 256;

  Guarded(const Engine& engine, std::int64_t bytes, bool pinned, std::int64_t shift = 0)
      : engine_(engine), bytes_(bytes), shift_(shift), pinned_(pinned) {
    base_ = static_cast<std::byte*>(engine_.allocate(bytes + shift + 2 * guard, pinned));
    const std::vector<std::byte> all(static_cast<std::size_t>(bytes + shift + 2 * guard), std::byte{poison});
    engine_.write(base_, all);
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() { engine_.free(base_, pinned_); }

  [[nodiscard]] void* data() const noexcept { return base_ + guard + shift_; }
  void write(const std::vector<std::byte>& from) const { engine_.write(data(), from); }
  [[nodiscard]] std::vector<std::byte> read() const { return engine_.read(data(), bytes_); }

  [[nodiscard]] bool intact() const {
    const auto before = engine_.read(base_, guard + shift_);
    const auto after = engine_.read(base_ + guard + shift_ + bytes_, guard);
    const auto is_poison = [](std::byte b) { return b == std::byte{poison}; };
    return std::all_of(before.begin(), before.end(), is_poison) &&
           std::all_of(after.begin(), after.end(), is_poison);
  }

 private:
  Engine engine_;
  std::int64_t bytes_;
  std::int64_t shift_;
  bool pinned_;
  std::byte* base_;
};

/// Does a workload as one rank.
template <class Case, class Comm, class Engine>
class RankRun {
 public:
  using Optimizer =
      so::ZeroOptimizer<typename Case::Rule, typename Case::Sharding, Comm, typename Case::Precision>;
  using Param = typename Optimizer::Param;
  using Grad = typename Optimizer::Grad;

  RankRun(const Workload& workload, Engine engine)
      : workload_(workload),
        engine_(engine),
        parameters_(engine, bytes<Param>(workload.extent), false, bytes<Param>(workload.shift_parameters)),
        gradients_(engine, bytes<Grad>(workload.extent), false, bytes<Grad>(workload.shift_gradients)) {}

  [[nodiscard]] RankOutcome operator()(Comm comm) {
    const int rank = comm.rank();
    outcome_.initial =
        filled<Param>(workload_, [&](std::int64_t at) { return initial_parameter(workload_, at); });
    parameters_.write(outcome_.initial);
    const so::ParameterTable table =
        table_of(workload_, parameters_.data(), gradients_.data(), {so::dtype_of<Param>, so::dtype_of<Grad>});
    const auto config = config_of<Case>(workload_);
    const bool adopted = workload_.memory == MemoryKind::state_buffers;
    const so::MemoryPlan plan = Optimizer::plan(table, config, {rank, workload_.world}, adopted);
    const bool gives = workload_.memory != MemoryKind::own;
    const Guarded<Engine> device(engine_, gives ? plan.device_bytes : 0, false);
    const Guarded<Engine> pinned(engine_, gives ? plan.pinned_bytes : 0, true);
    std::vector<std::unique_ptr<Guarded<Engine>>> buffers;
    typename Optimizer::Memory memory;
    if (gives) memory = so::Arena{device.data(), pinned.data()};
    if (adopted) {
      so::StateBuffers states;
      for (const auto& buffer : plan.buffers) {
        buffers.push_back(std::make_unique<Guarded<Engine>>(
            engine_, buffer.bytes, false, static_cast<std::int64_t>(4 * (1 + buffers.size()))));
        states.buffers.emplace_back(buffer.name, static_cast<float*>(buffers.back()->data()));
      }
      states.scratch = so::Arena{device.data(), pinned.data()};
      memory = states;
    }
    if (workload_.separate) {
      run(table, config, std::move(comm), so::SeparateBuffers<Param, Grad>{}, memory);
    } else {
      run(table, config, std::move(comm),
          so::FlatBuffers<Param, Grad>{static_cast<Param*>(parameters_.data()),
                                       static_cast<Grad*>(gradients_.data())},
          memory);
    }
    if (!device.intact() || !pinned.intact()) outcome_.guard_fault = "something beside the arena was written";
    if (!parameters_.intact() || !gradients_.intact())
      outcome_.guard_fault = "something beside the flat buffers was written";
    for (const auto& buffer : buffers) {
      if (!buffer->intact()) outcome_.guard_fault = "something beside a state buffer was written";
    }
    return std::move(outcome_);
  }

 private:
  template <class T>
  static std::int64_t bytes(std::int64_t elements) {
    return elements * static_cast<std::int64_t>(sizeof(T));
  }

  template <class Buffers>
  void run(const so::ParameterTable& table, const typename Optimizer::Config& config, Comm comm,
           const Buffers& buffers, const typename Optimizer::Memory& memory) {
    const int rank = comm.rank();
    Optimizer optimizer(table, config, std::move(comm), buffers, memory, engine_.stream());
    std::vector<so::StepTicket> tickets;
    for (int step = 0; step < workload_.steps; ++step) {
      outcome_.written.push_back(
          filled<Grad>(workload_, [&](std::int64_t at) { return gradient(workload_, step, rank, at); }));
      gradients_.write(outcome_.written.back());
      announce(optimizer, table);
      tickets.push_back(one_step(optimizer, step));
      optimizer.wait_parameters(engine_.stream());
      outcome_.parameters.push_back(parameters_.read());
      outcome_.gradients.push_back(gradients_.read());
    }
    for (const so::StepTicket& ticket : tickets) outcome_.results.push_back(ticket.get());
    for (const auto& part : optimizer.owned()) outcome_.owned.push_back({std::string(part.name), part.range});
    for (const auto& buffer : optimizer.memory_plan().buffers) {
      const std::span<float> state = optimizer.state(buffer.name);
      const auto raw = engine_.read(state.data(), bytes<float>(static_cast<std::int64_t>(state.size())));
      std::vector<float>& values = outcome_.states[buffer.name];
      values.resize(state.size());
      if (!raw.empty()) std::memcpy(values.data(), raw.data(), raw.size());
    }
  }

  void announce(Optimizer& optimizer, const so::ParameterTable& table) const {
    std::vector<so::ParameterId> ids;
    for (std::uint32_t k = 0; k < table.size(); ++k) {
      // A tied weight is announced by its second name.
      const bool has_alias = table.entries()[k].name == "grain + 1";
      if (!has_alias) ids.push_back({k});
    }
    switch (workload_.announce) {
      case Announce::nothing:
        return;
      case Announce::one_by_one_from_the_last:
        for (auto id = ids.rbegin(); id != ids.rend(); ++id) optimizer.gradient_ready(*id, engine_.stream());
        return;
      case Announce::in_sets: {
        const std::span<const so::ParameterId> all(ids);
        const std::size_t half = all.size() / 2;
        optimizer.gradient_ready(all.first(half), engine_.stream());
        optimizer.gradient_ready(all.subspan(half), engine_.stream());
        return;
      }
      case Announce::some:
        for (std::size_t k = 0; k < ids.size(); k += 2) optimizer.gradient_ready(ids[k], engine_.stream());
        return;
    }
  }

  [[nodiscard]] so::StepTicket one_step(Optimizer& optimizer, int step) const {
    const float factor = lr_factor(workload_, step);
    const so::StepOptions sums{.gradient_scale = gradient_scale(workload_, step)};
    if (step == workload_.discarded_step) {
      static_cast<void>(optimizer.reduce(sums, engine_.stream()));
      return optimizer.discard(engine_.stream());
    }
    if (step % 4 == 3) {
      static_cast<void>(optimizer.reduce(sums, engine_.stream()));
      return optimizer.apply({.lr_factor = factor}, engine_.stream());
    }
    return optimizer.step({.lr_factor = factor, .gradient_scale = sums.gradient_scale}, engine_.stream());
  }

  const Workload& workload_;
  Engine engine_;
  Guarded<Engine> parameters_;
  Guarded<Engine> gradients_;
  RankOutcome outcome_;
};

}  // namespace test
