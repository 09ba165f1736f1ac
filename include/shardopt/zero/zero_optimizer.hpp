// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/collective.hpp>
#include <shardopt/core/counts.hpp>
#include <shardopt/core/error.hpp>
#include <shardopt/core/math.hpp>
#include <shardopt/core/parameter_table.hpp>
#include <shardopt/core/range.hpp>
#include <shardopt/precision/precision_policy.hpp>
#include <shardopt/rules/rule.hpp>
#include <shardopt/sharding/sharding_policy.hpp>
#include <shardopt/zero/bucket_buffers.hpp>
#include <shardopt/zero/buffers.hpp>
#include <shardopt/zero/config.hpp>
#include <shardopt/zero/failure_latch.hpp>
#include <shardopt/zero/handshake.hpp>
#include <shardopt/zero/host_wait.hpp>
#include <shardopt/zero/initial_parameters.hpp>
#include <shardopt/zero/loss_scale.hpp>
#include <shardopt/zero/memory_plan.hpp>
#include <shardopt/zero/ownership.hpp>
#include <shardopt/zero/preparation.hpp>
#include <shardopt/zero/rank_state.hpp>
#include <shardopt/zero/setup_digest.hpp>
#include <shardopt/zero/state_access.hpp>
#include <shardopt/zero/state_run.hpp>
#include <shardopt/zero/step_control.hpp>
#include <shardopt/zero/step_pipeline.hpp>
#include <shardopt/zero/step_result.hpp>
#include <shardopt/zero/step_state.hpp>
#include <shardopt/zero/ticket.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace shardopt::inline v0 {

/// A sharded optimizer (ZeRO stage 1: Rajbhandari et al. 2020): each rank reduces gradients onto the slice it
/// owns, updates that slice with its share of the state, and gathers the new parameters.
///
/// Works on the engine's buffers, streams and communicator. Construction, `gradient_ready`, `step`, `reduce`,
/// `apply`, `discard` are collective: every rank makes the same calls in the same order (`gradient_ready` in
/// any order within a step). On CUDA of these only construction waits for the device.
///
/// One host thread at a time; different objects are independent. Neither copied nor moved: tickets and
/// captured graphs know its place. After a failure in the middle of a call the optimizer is *broken*: each
/// later call throws the same cause.
///
/// Every call but construction can also throw that cause, and what the device or the collective throws when a
/// call of theirs fails (CudaError, NcclError, CollectiveError): that breaks it, and the message says so. A
/// CudaError that does not say so came before anything was enqueued: the call may be made again. What
/// argument checking throws has enqueued nothing and breaks nothing.
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

  /// Sets up this rank: allocates (unless memory is given), compares the set-up of all ranks, brings
  /// parameters to agreement (`config.initial_parameters`), zeroes states and copies masters. Collective;
  /// waits for the device.
  /// @param table  the engine's parameters; copied
  /// @param comm  owned from now on (a borrowed communicator stays the engine's)
  /// @param buffers  FlatBuffers or SeparateBuffers of the precision's types, or of the engine's own types of
  /// the same kind
  /// @param memory  what the library is to use instead of allocating
  /// @param stream  has written the parameters; the optimizer's first work is ordered behind it
  /// @throws std::invalid_argument for a mistake of the caller; nothing of the engine's was touched, and the
  /// other ranks get a CollectiveError
  /// @throws CollectiveError on every rank if ranks disagree about the set-up or the initial parameters, or
  /// if another rank could not be set up
  /// @throws Error what the device or the collective throws when a call fails (CudaError, NcclError), or
  /// std::bad_alloc; the other ranks are told, where the collective can abort
  template <detail::BufferKind Buffers>
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
        buffers_(detail::set_up(comm_, [&] {
          return detail::engine_buffers<Param, Grad>(table_, buffers, prepared_.memory.plan, memory);
        })) {
    const StateBuffers* adopted = std::get_if<StateBuffers>(&memory);
    detail::set_up(comm_, [&] {
      state_.emplace(comm_.device(), prepared_.memory, std::get_if<Arena>(&memory), adopted,
                     config_.observer);
      steps_.emplace(comm_, table_, config_, prepared_, buffers_, *state_);
      owned_ = detail::owned_parts(prepared_.layout, table_);
      gradient_runs_ = detail::gradient_runs(table_, buffers_);
    });
    try {
      start(stream, adopted == nullptr || adopted->initialize);
    } catch (...) {
      tell_failed_start();
      let_go();
      throw;
    }
  }

  /// The same with memory of the library's own.
  template <detail::BufferKind Buffers>
  ZeroOptimizer(const ParameterTable& table, const Config& config, Comm comm, const Buffers& buffers,
                Stream stream)
      : ZeroOptimizer(table, config, std::move(comm), buffers, Memory{}, stream) {}

  ZeroOptimizer(const ZeroOptimizer&) = delete;
  ZeroOptimizer& operator=(const ZeroOptimizer&) = delete;

  /// Waits for what it enqueued, on whichever stream. Never throws, and does not hang where the collective
  /// watches for lost peers. If work can then not be ended (a borrowed communicator has failed and may not be
  /// aborted), the memory that the library allocated is left to the process; Arena, StateBuffers, parameters
  /// and gradients may be in use for ever, and the engine must not free them either.
  ///
  /// Replays of captured steps are the engine's to wait for first; then its graphs go, before this: NCCL
  /// waits for them where the communicator is the library's own. What the optimizer works on goes after it:
  /// the collective's stream, a borrowed communicator, the engine's buffers. Streams that its calls were
  /// given may go before, between steps.
  ///
  /// Where one process has several GPUs, CUDA may wait for all of them before it releases page-locked memory:
  /// let every rank's optimizer go before a rank begins another collective, or give an Arena.
  ~ZeroOptimizer() {
    if (steps_) let_go();
  }

  /// Says that gradients of this step are complete once what `stream` holds now is done. Reductions start as
  /// soon as their bucket is whole and its turn has come. Announce each parameter at most once a step, in the
  /// last micro-batch; frozen ones are ignored. Enqueues; does not wait (on the host, communicates).
  ///
  /// From a step's first announcement to its step() or reduce() the engine may use the same communicator only
  /// if all ranks announce in the same order: otherwise buckets go out at different places on each.
  /// @throws std::invalid_argument for an unknown id or one announced before in this step
  /// @throws std::logic_error after reduce(), or in a capture where the collective cannot be captured
  void gradient_ready(ParameterId id, Stream stream) { gradient_ready(std::span(&id, 1), stream); }

  /// Likewise for a set, in any order.
  void gradient_ready(std::span<const ParameterId> ids, Stream stream) {
    steps_->require_working();
    steps_->require_reduced(false, "gradient_ready");
    steps_->announce(ids, stream);
  }

  /// One step: reduces what is left (parameters never announced count as they stand behind `stream`),
  /// decides, updates on `stream`, and gathers on the collective's stream. Enqueues; does not wait (on the
  /// host, is done on return).
  /// @pre gradients never announced are complete behind `stream`; no other stream still reads the parameters
  /// @post work put on `stream` may write gradients; parameters may be read after wait_parameters
  /// @throws std::invalid_argument for options that are not finite or null, or factors in a capture
  /// @throws std::logic_error after reduce(), or if the step is partly in a capture and partly not
  StepTicket step(const StepOptions& options, Stream stream) {
    steps_->require_working();
    options.validate();
    steps_->require_reduced(false, "step");
    steps_->require_capturable(options, stream);
    return steps_->step(options, stream);
  }

  /// First half of a step: reduces, and measures the norm. The ticket tells `norm`, `clip_factor`,
  /// `non_finite`, and whether the step is to be skipped. Enqueues; does not wait.
  /// @param options  gradient_scale and scalars; lr_factor comes in apply()
  /// @throws std::invalid_argument for options that are not finite or null, factors in a capture, or a
  /// lr_factor
  /// @throws std::logic_error after reduce(), or if the step is partly in a capture and partly not
  StepTicket reduce(const StepOptions& options, Stream stream) {
    steps_->require_working();
    options.validate();
    steps_->require_reduced(false, "reduce");
    if (!math::equal(options.lr_factor, 1.0f))
      throw std::invalid_argument("shardopt: reduce() takes no lr_factor; give it to apply()");
    steps_->require_capturable(options, stream);
    return steps_->reduce(options, stream);
  }

  /// Second half: updates and gathers, unless the step is skipped. On reduce()'s stream or another. Enqueues;
  /// does not wait.
  /// @param options  lr_factor; where ranks give different ones the *next* step's ticket shows it, as this
  /// one's all-reduce has gone
  /// @throws std::invalid_argument for a lr_factor that is not finite, or a gradient_scale or scalars
  /// @throws std::logic_error without reduce() before, or if that was not in the same capture
  StepTicket apply(const StepOptions& options, Stream stream) {
    steps_->require_working();
    options.validate();
    steps_->require_reduced(true, "apply()");
    if (!options.gradient_scale.is_one() || options.has_scalars()) {
      throw std::invalid_argument(
          "shardopt: apply() takes lr_factor only; gradient_scale and scalars count in reduce()");
    }
    steps_->require_capturable(options, stream);
    return steps_->finish(options, stream, detail::StepEnd::apply);
  }

  /// The other second half: the step counts as skipped, nothing is updated. A gradient that is not finite
  /// moves the loss scale all the same.
  /// @throws std::logic_error without reduce() before, or if that was not in the same capture
  StepTicket discard(Stream stream) {
    steps_->require_working();
    steps_->require_reduced(true, "discard()");
    steps_->require_capturable({}, stream);
    return steps_->finish({}, stream, detail::StepEnd::discard);
  }

  /// `stream` goes on when the parameters of these ids have come. Enqueues; does not wait.
  ///
  /// Captures: a wait is part of one only for a step captured in it. Where the last step was not captured,
  /// wait for it before the capture begins. A captured step ends joined to its stream: who reads its
  /// parameters on another stream waits for the graph there; a wait outside does not.
  /// @throws std::invalid_argument for an unknown id
  /// @throws std::logic_error in a capture, for parameters gathered outside that nobody has waited for yet
  void wait_parameters(std::span<const ParameterId> ids, Stream stream) const {
    steps_->require_working();
    std::int64_t end = 0;
    for (const ParameterId id : ids) {
      end = (std::max)(end, prepared_.layout.buckets_of(table_[table_.storage_of(id)].flat).end);
    }
    steps_->wait_buckets(end, stream);
  }
  /// Likewise for one parameter.
  void wait_parameters(ParameterId id, Stream stream) const { wait_parameters(std::span(&id, 1), stream); }
  /// Likewise for all parameters.
  void wait_parameters(Stream stream) const {
    steps_->require_working();
    steps_->wait_buckets(steps_->bucket_count(), stream);
  }

  /// Zeroes the gradients of trainable parameters on `stream`, behind the last step's update; gaps and frozen
  /// ranges keep their bits.
  /// @throws std::logic_error between a step's first gradient_ready, or reduce(), and its end
  void zero_gradients(Stream stream) {
    steps_->require_between_steps("zero_gradients");
    steps_->guarded("zero_gradients", stream, [&] {
      steps_->wait_for_update(stream);
      for (const auto& [gradient, count] : gradient_runs_) {
        comm_.device().fill_zero(gradient, count * static_cast<std::int64_t>(sizeof(Grad)), stream);
      }
    });
  }

  /// What replays of a captured step work with from now on: enqueued on `stream`, before the graph's launch
  /// there, which is so ordered behind the last uncaptured step. The same values on every rank. Uncaptured
  /// steps take theirs from StepOptions.
  /// @param gradient_scale  a value, or device memory that holds it when the replay runs
  /// @throws std::invalid_argument for values that are not finite, or null
  void set_inputs(float lr_factor, GradientScale gradient_scale, Stream stream) {
    steps_->require_working();
    StepOptions{.lr_factor = lr_factor, .gradient_scale = gradient_scale}.validate();
    steps_->guarded("set_inputs", stream, [&] {
      if (comm_.device().capture_of(stream) == 0) steps_->settle(stream);
      comm_.device().invoke(
          detail::SetFactors{state_->control(), detail::factors_of(lr_factor, gradient_scale)}, stream);
    });
  }

  /// A ticket for the last step, replayed ones before it on `stream` included. Before the first step:
  /// StepResult's defaults.
  /// @throws std::logic_error in a capture, or after reduce(), whose own ticket tells what is known
  [[nodiscard]] StepTicket last_result(Stream stream) {
    steps_->require_working();
    steps_->require_reduced(false, "last_result");
    steps_->require_uncaptured("last_result", stream);
    return steps_->guarded("last_result", stream, [&] {
      steps_->wait_for_update(stream);
      const StepTicket ticket = steps_->issue(stream, [&](StepResult* slot) {
        comm_.device().invoke(detail::ReadResult{state_->control(), slot}, stream);
      });
      steps_->keep_behind(stream);
      return ticket;
    });
  }

  /// What has been counted, replayed steps before it on `stream` included. Waits for the last step and for
  /// what `stream` holds. Works on a broken optimizer too, as long as the device does: after a failure before
  /// the first update of a step was enqueued, these are the counters before that step.
  /// @throws std::logic_error in a capture
  [[nodiscard]] StepCounters counters(Stream stream) const {
    steps_->require_uncaptured("counters", stream);
    return steps_->counters(stream);
  }

  /// Where the loss scale of the next step stands: device memory that the engine's backward pass reads,
  /// behind the last step on its stream. 1 without loss scaling.
  [[nodiscard]] const float* loss_scale() const noexcept { return &state_->control()->counters.loss_scale; }

  /// Replaces a group's hyper-parameters from the next step on, replayed ones included. Every rank must do
  /// the same: tickets show where they differ. Enqueues; does not wait.
  /// @throws std::invalid_argument for an unknown group, a hyper-parameter out of range, or a rule that needs
  /// state where none is kept
  /// @throws std::logic_error in a capture, or in the middle of a step
  void set_rule(std::string_view group, const Rule& rule, Stream stream) {
    steps_->require_working();
    const std::size_t index = group_index(group);
    require_rule(group, rule);
    steps_->require_between_steps("set_rule");
    steps_->require_uncaptured("set_rule", stream);
    auto groups = config_.groups;
    groups[index].rule = rule;
    steps_->guarded("set_rule", stream, [&] {
      steps_->wait_for_update(stream);
      comm_.device().invoke(detail::AssignRule<Rule>{state_->rules() + index, rule, state_->control(),
                                                     detail::digest_of_rules(groups)},
                            stream);
      steps_->keep_behind(stream);
    });
    config_.groups = std::move(groups);
  }

  /// Changes nothing. @throws std::invalid_argument where set_rule() would
  void require_rule(std::string_view group, const Rule& rule) const {
    Config::validate_rule(rule, config_.groups[group_index(group)].name);
    if (!prepared_.stateful && !stateless(rule)) {
      throw std::invalid_argument("shardopt: group " + detail::in_quotes(group) +
                                  " was set up without state; these hyper-parameters need it");
    }
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
  [[nodiscard]] std::vector<StateRun> states() const { return access().runs(detail::StateCover::kept); }

  /// Those that this rank speaks for: over the ranks, each element once. The same as states() unless the
  /// sharding policy lets every rank keep everything.
  [[nodiscard]] std::vector<StateRun> owned_states() const {
    return access().runs(detail::StateCover::disjoint);
  }

  /// Copies this rank's part of a whole state from host memory: what an engine had before. Waits for what
  /// `stream` holds.
  /// @param values  all elements of the parameter
  /// @throws std::invalid_argument for an unknown or frozen parameter, an unknown state, or another number of
  /// values
  /// @throws std::logic_error in a capture, or in the middle of a step
  void set_state(std::string_view parameter, std::string_view state, std::span<const float> values,
                 Stream stream) {
    require_still("set_state", stream);
    const ParameterTable::Entry& entry = access().entry_of(parameter, state, values.size());
    steps_->guarded("set_state", stream, [&] {
      steps_->settle(stream);
      access().upload(entry, state, values, comm_.device(), stream);
      detail::wait_for(comm_, stream);
    });
  }

  /// Copies values from host memory into runs of states: what a checkpoint holds. Waits for what `stream`
  /// holds.
  /// @param runs  of states(), or parts of those
  /// @param values  of all runs, one behind the other
  /// @throws std::invalid_argument for another number of values, or a run that is no such part
  /// @throws std::logic_error in a capture, or in the middle of a step
  void set_states(std::span<const StateRun> runs, std::span<const float> values, Stream stream) {
    require_still("set_states", stream);
    const std::int64_t elements = detail::elements_of(runs);
    if (elements != static_cast<std::int64_t>(values.size())) {
      throw std::invalid_argument("shardopt: set_states: the runs have " + std::to_string(elements) +
                                  " elements, not " + std::to_string(values.size()));
    }
    access().require_kept(runs);
    steps_->guarded("set_states", stream, [&] {
      steps_->settle(stream);
      const float* from = values.data();
      for (const StateRun& run : runs) {
        comm_.device().upload(run.data, from, run.range.size() * static_cast<std::int64_t>(sizeof(float)),
                              stream);
        from += run.range.size();
      }
      detail::wait_for(comm_, stream);
    });
  }

  /// Brings all states to one rank's host memory, by state, each in table order; on other ranks the result is
  /// empty. Collective; waits. Takes device memory for one bucket of floats beside what was planned.
  /// @throws std::invalid_argument for a rank that does not exist
  /// @throws std::logic_error in a capture, or in the middle of a step
  [[nodiscard]] std::vector<FullState> gather_state(int root, Stream stream) {
    require_still("gather_state", stream);
    if (root < 0 || root >= world())
      throw std::invalid_argument("shardopt: gather_state: there is no rank " + std::to_string(root));
    return steps_->guarded("gather_state", stream, [&] {
      steps_->settle(stream);
      detail::wait_for(comm_, stream);
      return access().gather(comm_, root);
    });
  }

  /// Sets what is counted, and the loss scale with what is counted of it: begin with counters(). After states
  /// were brought back. The same on every rank. Waits for what `stream` holds.
  /// @throws std::invalid_argument for counts that are negative or beyond 2^62, a loss scale below 2^-126 or
  /// infinite, or one where none is configured
  /// @throws std::logic_error in a capture, or in the middle of a step
  void set_counters(const StepCounters& counters, Stream stream) {
    require_still("set_counters", stream);
    const auto [fewest, most] =
        std::minmax({counters.iteration, counters.updates, counters.loss_scale_good_steps,
                     std::int64_t{counters.loss_scale_hysteresis}});
    if (fewest < 0) throw std::invalid_argument("shardopt: set_counters: counts cannot be negative");
    if (most > max_steps)
      throw std::invalid_argument("shardopt: set_counters: counts must be at most " +
                                  std::to_string(max_steps));
    if (!detail::is_loss_scale(counters.loss_scale))
      throw std::invalid_argument("shardopt: set_counters: loss_scale must be at least 2^-126 and finite");
    if (!config_.loss_scale && !math::equal(counters.loss_scale, 1.0f)) {
      throw std::invalid_argument(
          "shardopt: set_counters: config.loss_scale is not set, so loss_scale must be 1");
    }
    steps_->guarded("set_counters", stream, [&] {
      steps_->settle(stream);
      comm_.device().invoke(detail::AssignCounters{state_->control(), counters}, stream);
      detail::wait_for(comm_, stream);
      steps_->recount(counters.iteration);
    });
  }

  /// Makes parameters from what this rank keeps: masters rounded as the update rounds them, then gathered
  /// from all ranks. Collective. Enqueues; does not wait: parameters may be read after wait_parameters.
  /// @throws std::logic_error in a capture, or in the middle of a step
  void restore_parameters(Stream stream) {
    require_still("restore_parameters", stream);
    steps_->guarded("restore_parameters", stream, [&] {
      steps_->settle(stream);
      steps_->remake_parameters(
          [&](std::size_t bucket) { state_->round_masters(bucket, comm_.device(), stream); }, stream);
    });
  }

  /// Makes masters from the parameters as they stand: after the engine wrote parameters itself. Without it
  /// the next step continues from the masters, and what was written is lost. Enqueues. No effect where
  /// parameters are fp32.
  /// @throws std::logic_error in a capture, or in the middle of a step
  void refresh_masters(Stream stream) {
    require_still("refresh_masters", stream);
    steps_->guarded("refresh_masters", stream, [&] {
      steps_->settle(stream);
      state_->initialize_masters(comm_.device(), stream);
      steps_->note_update(stream);
    });
  }

  /// Waits on the host for what `stream` holds, as the collective waits: where it watches for lost peers, one
  /// is an error and no wait for ever.
  /// @throws std::logic_error in a capture
  void synchronize(Stream stream) {
    steps_->require_working();
    steps_->require_uncaptured("synchronize", stream);
    steps_->guarded("synchronize", stream, [&] { detail::wait_for(comm_, stream); });
  }

  /// A text of every rank, in rank order. Collective; waits. For what an engine must agree on between steps.
  [[nodiscard]] std::vector<std::string> exchange(const std::string& mine) {
    steps_->require_working();
    return steps_->guarded("exchange",
                           [&] { return detail::exchange_texts(comm_, mine, state_->scratch()); });
  }

  /// @throws std::logic_error if gradients of a step were announced or reduced already, naming the call that
  /// cannot be made then
  void require_between_steps(std::string_view call) const { steps_->require_between_steps(call); }

  /// Page-locked memory for copies of states to the host: `transfer_bytes`, allocated at the first call
  /// beyond the plan, and kept until the optimizer goes.
  [[nodiscard]] std::span<std::byte> transfer_memory() {
    return {static_cast<std::byte*>(state_->transfer(transfer_bytes)),
            static_cast<std::size_t>(transfer_bytes)};
  }
  /// Bytes of transfer_memory().
  static constexpr std::int64_t transfer_bytes = std::int64_t{8} << 20;

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

  /// Compares the parameters of all ranks bit by bit, by digests: as they stand behind `stream` and the last
  /// step. Collective; waits. A check for tests and doubts.
  /// @throws CollectiveError on every rank, naming the first parameter that differs
  /// @throws std::logic_error in a capture
  void verify_parameters(Stream stream) {
    steps_->require_working();
    steps_->require_uncaptured("verify_parameters", stream);
    detail::require_equal(steps_->guarded("verify_parameters", [&] {
      steps_->keep_behind(stream);
      steps_->settle(comm_.stream());
      return detail::differing_parameter(comm_, table_, buffers_, state_->scratch());
    }));
  }

 private:
  using Preparation = detail::Preparation<Rule, Sharding, Comm, Precision>;
  using State = detail::RankState<Rule, Precision, Device>;
  using Steps = detail::StepPipeline<Rule, Sharding, Comm, Precision>;

  void start(Stream stream, bool initialize) {
    const Device& device = comm_.device();
    steps_->keep_behind(stream);
    detail::describe_setup<Rule, Sharding, Precision>(table_, config_, prepared_.reduction, prepared_.layout)
        .require_agreement(comm_, state_->scratch());
    if (config_.initial_parameters == InitialParameters::broadcast)
      detail::broadcast_parameters(comm_, table_, buffers_);
    if (config_.initial_parameters == InitialParameters::verify) {
      detail::require_equal(detail::differing_parameter(comm_, table_, buffers_, state_->scratch()));
    }
    state_->upload(prepared_.layout, buffers_, config_, device, comm_.stream());
    if (initialize) state_->initialize_buffers(device, comm_.stream());
    detail::wait_for(comm_, comm_.stream());
    if constexpr (requires { comm_.throw_if_failed(); }) comm_.throw_if_failed();
  }

  /// Other ranks may wait for what this one cannot do any more. A CollectiveError they get themselves.
  void tell_failed_start() noexcept {
    try {
      throw;
    } catch (const CollectiveError&) {
    } catch (const std::exception& error) {
      detail::give_up(comm_, error.what());
    } catch (...) {
      detail::give_up(comm_, "an unknown exception");
    }
  }

  /// Waits for what was enqueued; memory that a device may use for ever is left to the process.
  void let_go() noexcept {
    if (!steps_->finish_all()) state_->abandon();
  }

  /// @throws std::logic_error in a capture, or in the middle of a step
  void require_still(std::string_view call, Stream stream) const {
    steps_->require_between_steps(call);
    steps_->require_uncaptured(call, stream);
  }

  [[nodiscard]] detail::StateAccess<Precision, State> access() const {
    return {prepared_.layout, prepared_.memory.plan, table_, buffers_, *state_};
  }

  [[nodiscard]] std::size_t group_index(std::string_view group) const {
    for (std::size_t k = 0; k < config_.groups.size(); ++k) {
      if (config_.groups[k].name == group) return k;
    }
    throw std::invalid_argument("shardopt: no group is named " + detail::in_quotes(group));
  }

  Comm comm_;
  ParameterTable table_;
  Config config_;
  Preparation prepared_;
  detail::EngineBuffers<Param, Grad> buffers_;
  std::optional<State> state_;
  std::optional<Steps> steps_;
  std::vector<OwnedPart> owned_;
  std::vector<std::pair<Grad*, std::int64_t>> gradient_runs_;
};

}  // namespace shardopt::inline v0
