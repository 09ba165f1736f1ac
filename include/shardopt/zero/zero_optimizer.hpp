// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/collective.hpp>
#include <shardopt/core/parameter_table.hpp>
#include <shardopt/precision/precision_policy.hpp>
#include <shardopt/rules/rule.hpp>
#include <shardopt/sharding/sharding_policy.hpp>
#include <shardopt/zero/buffers.hpp>
#include <shardopt/zero/config.hpp>
#include <shardopt/zero/failure_latch.hpp>
#include <shardopt/zero/gradient_reducer.hpp>
#include <shardopt/zero/initial_parameters.hpp>
#include <shardopt/zero/ownership.hpp>
#include <shardopt/zero/parameter_gatherer.hpp>
#include <shardopt/zero/preparation.hpp>
#include <shardopt/zero/rank_state.hpp>
#include <shardopt/zero/setup_digest.hpp>
#include <shardopt/zero/state_gatherer.hpp>
#include <shardopt/zero/state_run.hpp>
#include <shardopt/zero/step_control.hpp>
#include <shardopt/zero/ticket.hpp>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace shardopt::inline v0 {

/// A sharded optimizer (ZeRO stage 1: Rajbhandari et al. 2020): each rank reduces gradients onto the slice it
/// owns, updates that slice with its share of the state, and gathers the new parameters.
///
/// Works on the engine's buffers, streams and communicator. Construction, `gradient_ready`, `step`, `reduce`,
/// `apply`, `discard` are collective: every rank makes the same calls in the same order (`gradient_ready` in
/// any order within a step). On CUDA none but construction waits for the device.
///
/// One host thread at a time; different objects are independent. After a failure in the middle of a call the
/// optimizer is *broken*: each later call throws the same cause.
template <OptimizerRule Rule,         ///< what one element's update is
          ShardingPolicy Sharding,    ///< who owns which elements
          Collective Comm,            ///< how ranks talk; names the device
          PrecisionPolicy Precision>  ///< what is stored in which type
class ZeroOptimizer {
 public:
  /// Where buffers live and kernels run.
  using Device = typename Comm::Device;
  /// What work is enqueued on.
  using Stream = typename Device::Stream;
  /// Type of the engine's parameters.
  using Param = typename Precision::Param;
  /// Type of the engine's gradients.
  using Grad = typename Precision::Grad;
  /// How it works.
  using Config = OptimizerConfig<Rule, Sharding>;
  /// Where states, masters and scratch live: the library's own allocation, an Arena, or StateBuffers.
  using Memory = std::variant<std::monostate, Arena, StateBuffers>;

  /// Bytes this rank will need, to the byte. Allocates nothing, needs no device, is not collective.
  /// @param adopted_states  whether states and masters will be given as StateBuffers
  /// @throws std::invalid_argument as the constructor does for table and config
  [[nodiscard]] static MemoryPlan plan(const ParameterTable& table, const Config& config, Placement placement,
                                       bool adopted_states = false) {
    return Preparation(table, config, placement, adopted_states).memory.plan;
  }

  /// Sets up this rank: compares the set-up of all ranks, allocates (unless memory is given), brings
  /// parameters to agreement
  /// (`config.initial_parameters`), zeroes states and copies masters. Collective; waits for the device.
  /// @param table  the engine's parameters; copied
  /// @param comm  owned from now on (a borrowed communicator stays the engine's)
  /// @param buffers  FlatBuffers or SeparateBuffers of the precision's types, or of the engine's own types of
  /// the same kind
  /// @param memory  what the library is to use instead of allocating
  /// @param stream  has written the parameters; the optimizer's first work is ordered behind it
  /// @throws std::invalid_argument for a mistake of the caller; nothing of the engine's was touched, and the
  /// other ranks get a CollectiveError
  /// @throws CollectiveError on every rank if ranks disagree about the set-up or the initial parameters
  template <class Buffers>
  ZeroOptimizer(const ParameterTable& table, const Config& config, Comm comm, const Buffers& buffers,
                Memory memory, Stream stream)
      : comm_(std::move(comm)),
        table_(table),
        config_(config),
        prepared_(detail::set_up(comm_,
                                 [&] {
                                   return Preparation(table_, config_, {comm_.rank(), comm_.world()},
                                                      std::holds_alternative<StateBuffers>(memory));
                                 })),
        buffers_(
            detail::set_up(comm_, [&] { return detail::engine_buffers<Param, Grad>(table_, buffers); })) {
    const StateBuffers* adopted = std::get_if<StateBuffers>(&memory);
    detail::set_up(comm_, [&] {
      state_.emplace(comm_.device(), prepared_.memory, std::get_if<Arena>(&memory), adopted,
                     config_.observer);
    });
    try {
      start(stream, adopted == nullptr || adopted->initialize);
    } catch (...) {
      // What was enqueued uses memory that is about to go.
      if (stuck()) {
        state_->abandon();
      } else {
        comm_.device().finish(comm_.stream());
      }
      throw;
    }
  }

  /// The same with memory of the library's own.
  template <class Buffers>
  ZeroOptimizer(const ParameterTable& table, const Config& config, Comm comm, const Buffers& buffers,
                Stream stream)
      : ZeroOptimizer(table, config, std::move(comm), buffers, Memory{}, stream) {}

  ZeroOptimizer(const ZeroOptimizer&) = delete;
  ZeroOptimizer& operator=(const ZeroOptimizer&) = delete;

  /// Waits for what it enqueued. Never throws, and does not hang where the collective watches for lost peers:
  /// if work can then not be ended, the memory it uses is left to the process.
  ///
  /// Where one process has several GPUs, CUDA may wait for all of them before it releases page-locked memory:
  /// let every rank's optimizer go before a rank begins another collective, or give an Arena.
  ~ZeroOptimizer() {
    if (tickets_) tickets_->close();
    bool ended = false;
    try {
      if (stepped_) waiter()(updated_);
      comm_.device().record(summed_, comm_.stream());
      waiter()(summed_);
      ended = true;
    } catch (...) {
      // The failure was reported by the call that met it, or is the engine's next call's to report.
    }
    if (!ended && stuck() && state_) state_->abandon();
  }

  /// Says that gradients of this step are complete once what `stream` holds now is done. Reductions start as
  /// soon as their bucket is whole and its turn has come. Announce each parameter at most once a step, in the
  /// last micro-batch; frozen ones are ignored. Enqueues; does not wait (on the host, communicates).
  /// @throws std::invalid_argument for an unknown id or one announced before in this step; std::logic_error
  /// after reduce()
  void gradient_ready(ParameterId id, Stream stream) { gradient_ready(std::span(&id, 1), stream); }

  /// Likewise for a set, in any order.
  void gradient_ready(std::span<const ParameterId> ids, Stream stream) {
    latch_.require_working();
    if (reduced_)
      throw std::logic_error("shardopt: gradient_ready after reduce(); call apply() or discard() first");
    const std::vector<std::uint32_t> entries = unannounced(ids);
    guarded("gradient_ready", [&] {
      for (const std::uint32_t entry : entries) {
        announced_[entry] = true;
        reducer_->announce(table_.entries()[entry].flat, stream, comm_.device());
      }
      reduce_whole_buckets();
    });
  }

  /// One step: reduces what is left (parameters never announced count as they stand behind `stream`),
  /// decides, updates on `stream`, and gathers on the collective's stream. Parameters may be read after
  /// `wait_parameters`. Gradients may be written again by work behind `stream`. Enqueues; does not wait (on
  /// the host, is done on return).
  /// @throws std::invalid_argument for options that are not finite; nothing was enqueued
  StepTicket step(const StepOptions& options, Stream stream) {
    latch_.require_working();
    options.validate();
    if (reduced_) throw std::logic_error("shardopt: step after reduce(); call apply() or discard()");
    static_cast<void>(reduce(options, stream));
    return apply(options, stream);
  }

  /// First half of a step: reduces, and measures the norm. The ticket tells `norm`, `clip_factor`,
  /// `non_finite`, and whether the step is to be skipped. Options: gradient_scale counts here, lr_factor in
  /// apply().
  StepTicket reduce(const StepOptions& options, Stream stream) {
    latch_.require_working();
    options.validate();
    if (reduced_) throw std::logic_error("shardopt: reduce after reduce(); call apply() or discard()");
    require_capturable(options, stream);
    return guarded("reduce", [&] {
      const Device& device = comm_.device();
      reducer_->announce_rest(stream, device);
      reduce_whole_buckets();
      enter("the all-reduce of the norm");
      const detail::StepInputs in = inputs(options, stream);
      if (options.has_scalars()) {  // written on the step's stream, read on the collective's
        device.record(offered_, stream);
        device.wait(comm_.stream(), offered_);
      }
      device.invoke(detail::OpenStep{state_->control(), in}, comm_.stream());
      comm_.all_reduce(state_->control()->words, detail::control_word::count);
      device.record(summed_, comm_.stream());
      device.wait(stream, summed_);
      const StepTicket ticket = issue(stream, [&](StepResult* slot) {
        device.invoke(detail::MeasureStep{state_->control(), in, slot}, stream);
      });
      reduced_ = true;
      return ticket;
    });
  }

  /// Second half: updates and gathers, unless the step is skipped.
  /// @throws std::logic_error without reduce() before
  StepTicket apply(const StepOptions& options, Stream stream) {
    latch_.require_working();
    options.validate();
    return finish(options, stream, false);
  }

  /// The other second half: the step counts as skipped, nothing is updated.
  StepTicket discard(Stream stream) { return finish({}, stream, true); }

  /// `stream` goes on when the parameters of these ids have come. Enqueues; does not wait.
  void wait_parameters(std::span<const ParameterId> ids, Stream stream) const {
    latch_.require_working();
    std::int64_t end = 0;
    for (const ParameterId id : ids) {
      end = (std::max)(end, prepared_.layout.buckets_of(table_[table_.storage_of(id)].flat).end);
    }
    wait_buckets(end, stream);
  }
  /// Likewise for one parameter.
  void wait_parameters(ParameterId id, Stream stream) const { wait_parameters(std::span(&id, 1), stream); }
  /// Likewise for all parameters.
  void wait_parameters(Stream stream) const {
    latch_.require_working();
    wait_buckets(static_cast<std::int64_t>(prepared_.layout.buckets().size()), stream);
  }

  /// Zeroes the gradients of trainable parameters on `stream`, behind the last step's update; gaps and frozen
  /// ranges keep their bits.
  void zero_gradients(Stream stream) {
    latch_.require_working();
    guarded("zero_gradients", [&] {
      if (stepped_) comm_.device().wait_in_capture(stream, updated_);
      for (const auto& [gradient, count] : gradient_runs_) {
        comm_.device().fill_zero(gradient, count * static_cast<std::int64_t>(sizeof(Grad)), stream);
      }
    });
  }

  /// What replays of a captured step work with from now on: enqueued on `stream`, before the graph's launch
  /// there, which it orders behind the last uncaptured step. The same values on every rank. Uncaptured
  /// steps take theirs from StepOptions.
  /// @param gradient_scale  a value, or device memory that holds it when the replay runs
  /// @throws std::invalid_argument for values that are not finite
  void set_inputs(float lr_factor, GradientScale gradient_scale, Stream stream) {
    latch_.require_working();
    StepOptions{.lr_factor = lr_factor, .gradient_scale = gradient_scale}.validate();
    guarded("set_inputs", [&] {
      settle(stream);
      comm_.device().invoke(
          detail::SetFactors{state_->control(), detail::factors_of(lr_factor, gradient_scale)}, stream);
    });
  }

  /// A ticket for the last step before it on `stream`, replayed ones included.
  [[nodiscard]] StepTicket last_result(Stream stream) {
    latch_.require_working();
    return guarded("last_result", [&] {
      return issue(stream, [&](StepResult* slot) {
        comm_.device().invoke(detail::ReadResult{state_->control(), slot}, stream);
      });
    });
  }

  /// What has been counted, replayed steps included. Waits for what `stream` holds. Works on a broken
  /// optimizer too, as long as the device does: after a failure before the first update of a step was
  /// enqueued, these are the counters before that step.
  [[nodiscard]] StepCounters counters(Stream stream) const {
    StepCounters result;
    comm_.device().download(&result,
                            decided_only_ ? &state_->control()->before : &state_->control()->counters,
                            sizeof result, stream);
    return result;
  }

  /// Where the loss scale of the next step stands: device memory that the engine's backward pass reads,
  /// behind the last step on its stream. 1 without loss scaling.
  [[nodiscard]] const float* loss_scale() const noexcept { return &state_->control()->counters.loss_scale; }

  /// Replaces a group's hyper-parameters from the next step on. Every rank must do the same: tickets show
  /// where they differ.
  /// @throws std::invalid_argument for an unknown group, a hyper-parameter out of range, or a rule that needs
  /// state where none is kept
  void set_rule(std::string_view group, const Rule& rule, Stream stream) {
    latch_.require_working();
    const std::size_t index = group_index(group);
    Config::validate_rule(rule, config_.groups[index].name);
    if (!prepared_.stateful && !stateless(rule)) {
      throw std::invalid_argument("shardopt: group " + detail::in_quotes(group) +
                                  " was set up without state; these hyper-parameters need it");
    }
    config_.groups[index].rule = rule;
    rules_digest_ = detail::digest_of_rules(config_.groups);
    guarded("set_rule", [&] {
      comm_.device().invoke(detail::AssignRule<Rule>{state_->rules() + index, rule}, stream);
    });
  }

  /// A group's hyper-parameters as the next step uses them. @throws std::invalid_argument for an unknown
  /// group
  [[nodiscard]] const Rule& rule(std::string_view group) const {
    return config_.groups[group_index(group)].rule;
  }

  /// What this rank keeps state for, in flat order: name and range of elements of each part.
  [[nodiscard]] std::span<const OwnedPart> owned() const noexcept { return owned_; }

  /// A state buffer of this rank ("exp_avg", …, "master"): device memory, `memory_plan().owned_parameters`
  /// elements in shard order; empty if no such buffer is kept.
  [[nodiscard]] std::span<float> state(std::string_view name) const noexcept { return state_->buffer(name); }

  /// All states that this rank keeps, run by run: by state, each in flat order. For an engine that writes
  /// files of its own. Device memory: read it behind the last step on its stream, write it between steps
  /// (then set_counters, restore_parameters).
  [[nodiscard]] std::vector<StateRun> states() const { return runs(detail::StateCover::kept); }

  /// Those that this rank speaks for: over the ranks, each element once. The same as states() unless the
  /// sharding policy lets every rank keep everything.
  [[nodiscard]] std::vector<StateRun> owned_states() const { return runs(detail::StateCover::disjoint); }

  /// Copies this rank's part of a whole state from host memory: what an engine had before. Waits for what
  /// `stream` holds.
  /// @param values  all elements of the parameter
  /// @throws std::invalid_argument for an unknown or frozen parameter, an unknown state, or another number of
  /// values
  void set_state(std::string_view parameter, std::string_view state, std::span<const float> values,
                 Stream stream) {
    require_between_steps("set_state");
    const ParameterTable::Entry& entry = table_[table_.storage_of(table_.id_of(parameter))];
    const std::string what = "state " + detail::in_quotes(state) + " of " + detail::in_quotes(parameter);
    if (entry.frozen)
      throw std::invalid_argument("shardopt: set_state: parameter " + detail::in_quotes(parameter) +
                                  " is frozen: it has no state");
    if (!keeps(state)) throw std::invalid_argument("shardopt: set_state: no " + what + " is kept");
    if (static_cast<std::int64_t>(values.size()) != entry.numel) {
      throw std::invalid_argument("shardopt: set_state: " + what + " has " + std::to_string(entry.numel) +
                                  " elements, not " + std::to_string(values.size()));
    }
    guarded("set_state", [&] {
      settle(stream);
      for (const StateRun& run : states()) {
        if (run.state != state || run.parameter.data() != entry.name.data()) continue;
        comm_.device().upload(run.data, values.data() + run.range.begin,
                              run.range.size() * static_cast<std::int64_t>(sizeof(float)), stream);
      }
      comm_.device().synchronize(stream);
    });
  }

  /// Brings all states to one rank's host memory, by state, each in table order; on other ranks the result is
  /// empty. Collective; waits. Takes device memory for one bucket of floats beside what was planned.
  /// @throws std::invalid_argument for a rank that does not exist
  [[nodiscard]] std::vector<FullState> gather_state(int root, Stream stream) {
    require_between_steps("gather_state");
    if (root < 0 || root >= world())
      throw std::invalid_argument("shardopt: gather_state: there is no rank " + std::to_string(root));
    return guarded("gather_state", [&] {
      settle(stream);
      comm_.device().synchronize(stream);
      return gather_all(root);
    });
  }

  /// Sets what is counted: after states were brought back. The same on every rank. Waits for what `stream`
  /// holds.
  /// @throws std::invalid_argument for negative counts, or a loss scale where none is configured
  void set_counters(const StepCounters& counters, Stream stream) {
    require_between_steps("set_counters");
    if (counters.iteration < 0 || counters.updates < 0 || counters.loss_scale_good_steps < 0)
      throw std::invalid_argument("shardopt: set_counters: counts cannot be negative");
    if (!math::is_finite(counters.loss_scale) || !math::less(0.0f, counters.loss_scale))
      throw std::invalid_argument("shardopt: set_counters: loss_scale must be positive and finite");
    if (!config_.loss_scale && !math::equal(counters.loss_scale, 1.0f)) {
      throw std::invalid_argument(
          "shardopt: set_counters: config.loss_scale is not set, so loss_scale must be 1");
    }
    guarded("set_counters", [&] {
      settle(stream);
      comm_.device().invoke(detail::AssignCounters{state_->control(), counters}, stream);
      comm_.device().synchronize(stream);
      iteration_ = counters.iteration;
    });
  }

  /// Makes parameters from what this rank keeps: masters rounded as the update rounds them, then gathered
  /// from all ranks. Collective. Enqueues; does not wait: parameters may be read after wait_parameters.
  void restore_parameters(Stream stream) {
    require_between_steps("restore_parameters");
    guarded("restore_parameters", [&] {
      settle(stream);
      for (std::size_t b = 0; b < state_->tiles().size(); ++b) {
        state_->round_masters(b, comm_.device(), stream);
        gatherer_->gather(comm_, b, stream);
      }
      gathering_ = true;
      comm_.device().record(updated_, stream);
      stepped_ = true;
    });
  }

  /// Makes masters from the parameters as they stand: after the engine wrote parameters itself. Without it
  /// the next step continues from the masters, and what was written is lost. Enqueues. No effect where
  /// parameters are fp32.
  void refresh_masters(Stream stream) {
    require_between_steps("refresh_masters");
    guarded("refresh_masters", [&] {
      settle(stream);
      state_->initialize_masters(comm_.device(), stream);
      comm_.device().record(updated_, stream);
      stepped_ = true;
    });
  }

  /// A text of every rank, in rank order. Collective; waits. For what an engine must agree on between steps.
  [[nodiscard]] std::vector<std::string> exchange(const std::string& mine) {
    latch_.require_working();
    return guarded("exchange", [&] { return detail::exchange_texts(comm_, mine, state_->scratch()); });
  }

  /// @throws std::logic_error if gradients of a step were announced or reduced already, naming the call that
  /// cannot be made then
  void require_between_steps(std::string_view call) const {
    latch_.require_working();
    if (reduced_ || std::find(announced_.begin(), announced_.end(), true) != announced_.end()) {
      throw std::logic_error("shardopt: " + std::string(call) +
                             " in the middle of a step: gradients were announced or reduced; call it after "
                             "step(), apply() or discard()");
    }
  }

  /// Where buffers live.
  [[nodiscard]] Device device() const { return comm_.device(); }

  /// Bytes of this rank, as plan() gives them.
  [[nodiscard]] const MemoryPlan& memory_plan() const noexcept { return prepared_.memory.plan; }
  /// The copy that was made at the start.
  [[nodiscard]] const ParameterTable& table() const noexcept { return table_; }
  /// With what set_rule() changed.
  [[nodiscard]] const Config& config() const noexcept { return config_; }
  /// What Reduction::automatic became.
  [[nodiscard]] Reduction reduction() const noexcept { return prepared_.reduction; }
  /// This rank: 0 .. world - 1.
  [[nodiscard]] int rank() const noexcept { return comm_.rank(); }
  /// Number of ranks.
  [[nodiscard]] int world() const noexcept { return comm_.world(); }

  /// Compares the parameters of all ranks bit by bit, by digests. Collective; waits for the device. A check
  /// for tests and doubts.
  /// @throws CollectiveError on every rank, naming the first parameter that differs
  void verify_parameters() {
    latch_.require_working();
    detail::require_equal(guarded("verify_parameters", [&] {
      wait_parameters(comm_.stream());
      return detail::differing_parameter(comm_, table_, buffers_, state_->scratch());
    }));
  }

 private:
  using Preparation = detail::Preparation<Rule, Sharding, Comm, Precision>;
  using Reducer = detail::GradientReducer<Comm, Param, Grad>;
  using Gatherer = detail::ParameterGatherer<Comm, Param, Grad>;

  void start(Stream stream, bool initialize) {
    const Device& device = comm_.device();
    offered_ = device.make_event();
    summed_ = device.make_event();
    updated_ = device.make_event();
    device.record(updated_, stream);
    device.wait(comm_.stream(), updated_);
    detail::describe_setup<Rule, Sharding, Precision>(table_, config_, prepared_.reduction, prepared_.layout)
        .require_agreement(comm_, state_->scratch());
    if (config_.initial_parameters == InitialParameters::broadcast)
      detail::broadcast_parameters(comm_, table_, buffers_);
    if (config_.initial_parameters == InitialParameters::verify) {
      detail::require_equal(detail::differing_parameter(comm_, table_, buffers_, state_->scratch()));
    }
    state_->upload(prepared_.layout, buffers_, config_, device, comm_.stream());
    if (initialize) state_->initialize_buffers(device, comm_.stream());
    const typename Reducer::Memory memory{state_->template staging<Grad>(), state_->workspace(),
                                          state_->control()->words};
    reducer_.emplace(prepared_.layout, buffers_, state_->tiles(), prepared_.reduction, memory,
                     config_.observer);
    gatherer_.emplace(prepared_.layout, buffers_, state_->tiles(), state_->template staging<Param>(), device);
    tickets_ =
        std::make_shared<detail::TicketRing<Device>>(device, waiter(), state_->pinned(), config_.observer);
    rules_digest_ = detail::digest_of_rules(config_.groups);
    announced_.assign(table_.size(), false);
    owned_ = detail::owned_parts(prepared_.layout, table_);
    gradient_runs_ = detail::gradient_runs(table_, buffers_);
    device.synchronize(comm_.stream());
  }

  [[nodiscard]] std::vector<StateRun> runs(detail::StateCover cover) const {
    std::vector<StateRun> result;
    for (const auto& buffer : prepared_.memory.plan.buffers) {
      detail::append_state_runs(prepared_.layout, table_, buffers_, buffer.name,
                                state_->buffer(buffer.name).data(), cover, result);
    }
    if constexpr (!Precision::has_master)
      detail::append_state_runs(prepared_.layout, table_, buffers_, "master", nullptr, cover, result);
    return result;
  }

  [[nodiscard]] bool keeps(std::string_view state) const {
    if (!Precision::has_master && state == "master") return true;
    const auto& buffers = prepared_.memory.plan.buffers;
    return std::any_of(buffers.begin(), buffers.end(), [&](const auto& b) { return b.name == state; });
  }

  /// `stream` goes on behind the last update and what it gathered.
  void settle(Stream stream) const {
    if (stepped_) comm_.device().wait_in_capture(stream, updated_);
    wait_buckets(static_cast<std::int64_t>(prepared_.layout.buckets().size()), stream);
  }

  [[nodiscard]] std::vector<FullState> gather_all(int root) {
    std::vector<FullState> result;
    std::vector<std::string_view> names;
    for (const auto& buffer : prepared_.memory.plan.buffers) names.emplace_back(buffer.name);
    if (!Precision::has_master) names.emplace_back("master");
    const std::vector<StateRun> kept = states();
    for (const std::string_view name : names) {
      const std::size_t first = result.size();
      std::vector<FullState*> into(table_.size(), nullptr);
      if (rank() == root) {
        for (const auto& entry : table_.entries()) {
          if (entry.frozen || entry.alias_of) continue;
          result.push_back({name, entry.name, std::vector<float>(static_cast<std::size_t>(entry.numel))});
        }
        std::size_t at = first;
        for (std::uint32_t k = 0; k < table_.size(); ++k) {
          const auto& entry = table_.entries()[k];
          if (!entry.frozen && !entry.alias_of) into[k] = &result[at++];
        }
      }
      gather_one(name, kept, root, into);
    }
    return result;
  }

  /// A state that every rank has whole is read where the root keeps it, or from its fp32 parameters.
  void gather_one(std::string_view name, const std::vector<StateRun>& kept, int root,
                  std::vector<FullState*>& into) {
    const bool is_parameter = !Precision::has_master && name == "master";
    if (!is_parameter && !prepared_.layout.updates_everything()) {
      detail::gather_sharded_state(comm_, prepared_.layout, table_, state_->buffer(name).data(), root, into);
      return;
    }
    if (rank() != root) return;
    const auto read = [&](FullState& full, std::int64_t begin, const void* from, std::int64_t count) {
      comm_.device().download(full.values.data() + begin, from,
                              count * static_cast<std::int64_t>(sizeof(float)), comm_.stream());
    };
    for (std::uint32_t k = 0; is_parameter && k < table_.size(); ++k) {
      if (into[k] != nullptr) read(*into[k], 0, buffers_.parameter(k), table_.entries()[k].numel);
    }
    for (const StateRun& run : kept) {
      if (is_parameter || run.state != name) continue;
      read(*into[table_.id_of(run.parameter).index], run.range.begin, run.data, run.range.size());
    }
  }

  [[nodiscard]] std::vector<std::uint32_t> unannounced(std::span<const ParameterId> ids) const {
    std::vector<std::uint32_t> entries;
    for (const ParameterId id : ids) {
      const std::uint32_t entry = table_.storage_of(id).index;
      if (table_.entries()[entry].frozen) continue;
      if (announced_[entry] || std::find(entries.begin(), entries.end(), entry) != entries.end()) {
        throw std::invalid_argument(
            "shardopt: the gradient of parameter " + detail::in_quotes(table_.entries()[entry].name) +
            " was announced twice in one step; announce in the last micro-batch only, tied weights once");
      }
      entries.push_back(entry);
    }
    return entries;
  }

  [[nodiscard]] std::size_t group_index(std::string_view group) const {
    for (std::size_t k = 0; k < config_.groups.size(); ++k) {
      if (config_.groups[k].name == group) return k;
    }
    throw std::invalid_argument("shardopt: no group is named " + detail::in_quotes(group));
  }

  [[nodiscard]] detail::StepInputs inputs(const StepOptions& options, Stream stream) const {
    detail::StepInputs in{.factors = detail::factors_of(options.lr_factor, options.gradient_scale),
                          .factors_on_device = comm_.device().capture_of(stream) != 0,
                          .rules_digest = rules_digest_,
                          .max_norm = config_.max_norm,
                          .clip_epsilon = config_.clip_epsilon,
                          .world = comm_.world(),
                          .non_finite = config_.non_finite,
                          .count_skipped = config_.count_skipped_updates,
                          .scales_loss = config_.loss_scale.has_value(),
                          .loss_scale = config_.loss_scale.value_or(DynamicLossScale{})};
    for (std::size_t k = 0; k < options.scalars.size(); ++k) in.scalars[k] = options.scalars[k];
    return in;
  }

  void reduce_whole_buckets() {
    do {
      enter("the reduction of bucket " + std::to_string(reducer_->next()));
    } while (reducer_->reduce_next(comm_));
  }

  StepTicket finish(const StepOptions& options, Stream stream, bool discard) {
    latch_.require_working();
    if (!reduced_) throw std::logic_error("shardopt: apply() or discard() without reduce() before");
    require_capturable(options, stream);
    return guarded(discard ? "discard" : "apply", [&] {
      const Device& device = comm_.device();
      detail::StepInputs in = inputs(options, stream);
      in.discard = discard;
      enter("the decision");
      const StepTicket ticket = issue(stream, [&](StepResult* slot) {
        device.invoke(detail::DecideStep<Rule>{state_->control(), in, state_->rules(), state_->constants(),
                                               static_cast<int>(config_.groups.size()), slot},
                      stream);
        decided_only_ = true;
      });
      if (!discard) update_and_gather(stream);
      decided_only_ = false;
      device.record(updated_, stream);
      // The next step's sums must find those of this one cleared. The gradients that it waits for are written
      // behind this step; where there are none, the stream itself must wait.
      if (state_->tiles().empty()) device.wait(comm_.stream(), updated_);
      if (device.capture_of(stream) != 0) join(stream);
      stepped_ = true;
      reduced_ = false;
      announced_.assign(announced_.size(), false);
      reducer_->restart();
      ++iteration_;
      return ticket;
    });
  }

  void update_and_gather(Stream stream) {
    const std::vector<detail::BucketTiles>& tiles = state_->tiles();
    for (std::size_t b = 0; b < tiles.size(); ++b) {
      enter("the update of bucket " + std::to_string(b));
      if (tiles[b].updated.count > 0) {
        comm_.device().update(state_->update_arguments(tiles[b].updated, prepared_.stateful), stream);
        decided_only_ = false;
      }
      enter("the gather of bucket " + std::to_string(b));
      gatherer_->gather(comm_, b, stream);
    }
    gathering_ = true;
  }

  /// Brings the collective's stream back into `stream`: a capture must end in the stream that it began in.
  void join(Stream stream) {
    comm_.device().record(summed_, comm_.stream());
    comm_.device().wait(stream, summed_);
  }

  /// Enqueues what writes a result, by `write(slot)`, and gives its ticket. In a capture there is none: a
  /// replay cannot know which slot is free.
  template <class Write>
  StepTicket issue(Stream stream, const Write& write) {
    if (comm_.device().capture_of(stream) != 0) {
      write(static_cast<StepResult*>(nullptr));
      return StepTicket(tickets_, detail::TicketSource::captured);
    }
    write(tickets_->claim());
    tickets_->mark(stream);
    return StepTicket(tickets_, tickets_->last());
  }

  void require_capturable(const StepOptions& options, Stream stream) const {
    const auto capture = comm_.device().capture_of(stream);
    if (capture != 0 && (options.lr_factor != 1.0f || options.gradient_scale.value() != 1.0f ||
                         options.gradient_scale.pointer() != nullptr)) {
      throw std::invalid_argument(
          "shardopt: a captured step takes its factors from set_inputs(), called before each replay; "
          "leave StepOptions' lr_factor and gradient_scale at 1");
    }
    if (!reduced_) reducer_->require_capture(capture);
  }

  /// Buckets come in ascending order, on one stream: who waits for one has waited for those before it.
  void wait_buckets(std::int64_t end, Stream stream) const {
    if (gathering_ && end > 0) gatherer_->wait(static_cast<std::size_t>(end - 1), stream, comm_.device());
  }

  /// How the host waits for the device: the collective's way, where it watches for failures.
  [[nodiscard]] std::function<void(const typename Device::Event&)> waiter() const {
    if constexpr (requires { comm_.waiter(); }) {
      return comm_.waiter();
    } else {
      return [device = comm_.device()](const typename Device::Event& event) { device.synchronize(event); };
    }
  }

  /// Whether what was enqueued may never end.
  [[nodiscard]] bool stuck() const noexcept {
    if constexpr (requires { comm_.stuck(); }) {
      return comm_.stuck();
    } else {
      return false;
    }
  }

  /// Notes what is being done, for messages.
  void enter(std::string what) { latch_.enter(comm_, iteration_ + 1, std::move(what)); }

  /// Runs what enqueues. A failure in it breaks the optimizer.
  template <class Body>
  auto guarded(std::string_view call, const Body& body) {
    return latch_.run(comm_, iteration_ + 1, call, body);
  }

  Comm comm_;
  ParameterTable table_;
  Config config_;
  Preparation prepared_;
  detail::EngineBuffers<Param, Grad> buffers_;
  std::optional<detail::RankState<Rule, Precision, Device>> state_;
  std::optional<Reducer> reducer_;
  std::optional<Gatherer> gatherer_;
  std::shared_ptr<detail::TicketRing<Device>> tickets_;
  typename Device::Event offered_;  ///< behind the engine's scalars, on the step's stream
  typename Device::Event summed_;   ///< behind the all-reduce, on the collective's stream
  typename Device::Event updated_;  ///< behind the last update, on the step's stream
  std::vector<OwnedPart> owned_;
  std::vector<std::pair<Grad*, std::int64_t>> gradient_runs_;
  std::vector<bool> announced_;
  std::uint64_t rules_digest_ = 0;
  std::int64_t iteration_ = 0;
  bool reduced_ = false;
  bool stepped_ = false;
  bool decided_only_ = false;  ///< a decision was enqueued, but no update yet
  bool gathering_ = false;
  detail::FailureLatch latch_;
};

}  // namespace shardopt::inline v0
