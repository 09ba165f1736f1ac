// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/collective.hpp>
#include <shardopt/core/parameter_table.hpp>
#include <shardopt/precision/precision_policy.hpp>
#include <shardopt/rules/rule.hpp>
#include <shardopt/sharding/sharding_policy.hpp>
#include <shardopt/zero/buffers.hpp>
#include <shardopt/zero/config.hpp>
#include <shardopt/zero/gradient_reducer.hpp>
#include <shardopt/zero/initial_parameters.hpp>
#include <shardopt/zero/owned_memory.hpp>
#include <shardopt/zero/parameter_gatherer.hpp>
#include <shardopt/zero/setup_digest.hpp>
#include <shardopt/zero/step_control.hpp>
#include <shardopt/zero/step_memory.hpp>
#include <shardopt/zero/ticket.hpp>

#include <exception>
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

/// Which rank of how many.
struct Placement {
  /// This rank: 0 .. world - 1.
  int rank = 0;
  /// Number of ranks.
  int world = 1;
};

/// A run of a parameter that a rank keeps state for.
struct OwnedPart {
  std::string_view name;  ///< of the parameter; valid while the optimizer lives
  Range range;            ///< elements of the parameter
};

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
    return Prepared(table, config, placement, adopted_states).memory.plan;
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
                                   return Prepared(table_, config_, {comm_.rank(), comm_.world()},
                                                   std::holds_alternative<StateBuffers>(memory));
                                 })),
        buffers_(detail::set_up(
            comm_, [&] { return detail::EngineBuffers<Param, Grad>(table_, converted(buffers)); })) {
    require_types<Buffers>();
    const StateBuffers* adopted = std::get_if<StateBuffers>(&memory);
    const Arena* arena = std::get_if<Arena>(&memory);
    detail::set_up(comm_, [&] {
      if (adopted != nullptr) require_states(*adopted);
      attach_memory(arena != nullptr     ? *arena
                    : adopted != nullptr ? adopted->scratch
                                         : Arena{},
                    adopted, arena != nullptr);
    });
    try {
      start(stream, adopted == nullptr || adopted->initialize);
    } catch (...) {
      comm_.device().finish(comm_.stream());  // what was enqueued uses memory that is about to go
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
    try {
      if (stepped_) waiter()(updated_);
      comm_.device().record(summed_, comm_.stream());
      waiter()(summed_);
    } catch (...) {
      // The failure was reported by the call that met it, or is the engine's next call's to report.
    }
    if constexpr (requires { comm_.stuck(); }) {
      if (comm_.stuck() && memory_) memory_->abandon();
    }
  }

  /// Says that gradients of this step are complete once what `stream` holds now is done. Reductions start as
  /// soon as their bucket is whole and its turn has come. Announce each parameter at most once a step, in the
  /// last micro-batch; frozen ones are ignored. Enqueues; does not wait (on the host, communicates).
  /// @throws std::invalid_argument for an unknown id or one announced before in this step; std::logic_error
  /// after reduce()
  void gradient_ready(ParameterId id, Stream stream) { gradient_ready(std::span(&id, 1), stream); }

  /// Likewise for a set, in any order.
  void gradient_ready(std::span<const ParameterId> ids, Stream stream) {
    require_working();
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
    require_working();
    validate(options);
    if (reduced_) throw std::logic_error("shardopt: step after reduce(); call apply() or discard()");
    static_cast<void>(reduce(options, stream));
    return apply(options, stream);
  }

  /// First half of a step: reduces, and measures the norm. The ticket tells `norm`, `clip_factor`,
  /// `non_finite`, and whether the step is to be skipped. Options: gradient_scale counts here, lr_factor in
  /// apply().
  StepTicket reduce(const StepOptions& options, Stream stream) {
    require_working();
    validate(options);
    if (reduced_) throw std::logic_error("shardopt: reduce after reduce(); call apply() or discard()");
    require_capturable(options, stream);
    return guarded("reduce", [&] {
      const Device& device = comm_.device();
      reducer_->announce_rest(stream, device);
      reduce_whole_buckets();
      enter("the all-reduce of the norm");
      const detail::StepInputs in = inputs(options, stream);
      device.invoke(detail::OpenStep{state_, in}, comm_.stream());
      comm_.all_reduce(state_->words, detail::control_word::count);
      device.record(summed_, comm_.stream());
      device.wait(stream, summed_);
      const StepTicket ticket = issue(stream, [&](StepResult* slot) {
        device.invoke(detail::MeasureStep{state_, in, slot}, stream);
      });
      device.record(decided_, stream);
      device.wait(comm_.stream(), decided_);
      reduced_ = true;
      return ticket;
    });
  }

  /// Second half: updates and gathers, unless the step is skipped.
  /// @throws std::logic_error without reduce() before
  StepTicket apply(const StepOptions& options, Stream stream) {
    require_working();
    validate(options);
    return finish(options, stream, false);
  }

  /// The other second half: the step counts as skipped, nothing is updated.
  StepTicket discard(Stream stream) { return finish({}, stream, true); }

  /// `stream` goes on when the parameters of these ids have come. Enqueues; does not wait.
  void wait_parameters(std::span<const ParameterId> ids, Stream stream) const {
    require_working();
    for (const ParameterId id : ids) {
      const Range buckets = prepared_.layout.buckets_of(table_[table_.storage_of(id)].flat);
      for (std::int64_t b = buckets.begin; b < buckets.end; ++b)
        wait_bucket(static_cast<std::size_t>(b), stream);
    }
  }
  /// Likewise for one parameter.
  void wait_parameters(ParameterId id, Stream stream) const { wait_parameters(std::span(&id, 1), stream); }
  /// Likewise for all parameters.
  void wait_parameters(Stream stream) const {
    require_working();
    for (std::size_t b = 0; b < prepared_.layout.buckets().size(); ++b) wait_bucket(b, stream);
  }

  /// Zeroes the gradients of trainable parameters on `stream`, behind the last step's update; gaps and frozen
  /// ranges keep their bits.
  void zero_gradients(Stream stream) {
    require_working();
    guarded("zero_gradients", [&] {
      if (stepped_) comm_.device().wait_in_capture(stream, updated_);
      for (const auto& [gradient, count] : gradient_runs_) {
        comm_.device().fill_zero(gradient, count * static_cast<std::int64_t>(sizeof(Grad)), stream);
      }
    });
  }

  /// What replays of a captured step work with from now on: enqueued on `stream`, before the graph's launch
  /// there. The same values on every rank. Uncaptured steps take theirs from StepOptions.
  /// @param gradient_scale  a value, or device memory that holds it when the replay runs
  /// @throws std::invalid_argument for values that are not finite
  void set_inputs(float lr_factor, GradientScale gradient_scale, Stream stream) {
    require_working();
    validate({.lr_factor = lr_factor, .gradient_scale = gradient_scale});
    guarded("set_inputs", [&] {
      comm_.device().invoke(detail::SetFactors{state_, detail::factors_of(lr_factor, gradient_scale)},
                            stream);
    });
  }

  /// A ticket for the last step before it on `stream`, replayed ones included.
  [[nodiscard]] StepTicket last_result(Stream stream) {
    require_working();
    return guarded("last_result", [&] {
      return issue(stream, [&](StepResult* slot) {
        comm_.device().invoke(detail::ReadResult{state_, slot}, stream);
      });
    });
  }

  /// What has been counted, replayed steps included. Waits for what `stream` holds. Works on a broken
  /// optimizer too, as long as the device does: after a failure before the first update of a step was
  /// enqueued, these are the counters before that step.
  [[nodiscard]] StepCounters counters(Stream stream) const {
    StepCounters result;
    comm_.device().download(&result, decided_only_ ? &state_->before : &state_->counters, sizeof result,
                            stream);
    return result;
  }

  /// Where the loss scale of the next step stands: device memory that the engine's backward pass reads,
  /// behind the last step on its stream. 1 without loss scaling.
  [[nodiscard]] const float* loss_scale() const noexcept { return &state_->counters.loss_scale; }

  /// Replaces a group's hyper-parameters from the next step on. Every rank must do the same: tickets show
  /// where they differ.
  /// @throws std::invalid_argument for an unknown group, a hyper-parameter out of range, or a rule that needs
  /// state where none is kept
  void set_rule(std::string_view group, const Rule& rule, Stream stream) {
    require_working();
    const std::size_t index = group_index(group);
    Config::validate_rule(rule, config_.groups[index].name);
    if (!prepared_.stateful && !stateless(rule)) {
      throw std::invalid_argument("shardopt: group " + detail::quoted(group) +
                                  " was set up without state; these hyper-parameters need it");
    }
    config_.groups[index].rule = rule;
    rules_digest_ = detail::digest_of_rules(config_.groups);
    guarded("set_rule", [&] { comm_.device().invoke(detail::AssignRule<Rule>{rules_ + index, rule}, stream); });
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
  [[nodiscard]] std::span<float> state(std::string_view name) const noexcept {
    const auto& buffers = memory_plan().buffers;
    for (std::size_t k = 0; k < buffers.size(); ++k) {
      if (buffers[k].name == name)
        return {state_buffers_[k], static_cast<std::size_t>(memory_plan().owned_parameters)};
    }
    return {};
  }

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
    require_working();
    guarded("verify_parameters", [&] {
      wait_parameters(comm_.stream());
      detail::require_equal_parameters(comm_, table_, buffers_, scratch_);
    });
  }

 private:
  /// All that follows from table, configuration and placement alone.
  struct Prepared {
    Prepared(const ParameterTable& table, const Config& config, Placement placement, bool adopted)
        : reduction(resolved(config, placement)),
          stateful(keeps_state(config)),
          layout(table, names(config), config.sharding, placement.rank, placement.world, sizeof(Grad)),
          memory(detail::plan_memory<Rule, Comm, Precision>(layout, config.groups.size(), reduction, stateful,
                                                            adopted)) {}

    Reduction reduction;
    bool stateful;
    detail::ShardLayout layout;
    detail::PlannedMemory memory;

   private:
    static Reduction resolved(const Config& config, Placement placement) {
      config.validate();
      if (placement.world < 1 || placement.rank < 0 || placement.rank >= placement.world) {
        throw std::invalid_argument("shardopt: rank " + std::to_string(placement.rank) + " of a world of " +
                                    std::to_string(placement.world) + " does not exist");
      }
      const Dtype type = dtype_of<Grad>;
      if (config.reduction == Reduction::automatic) return Comm::automatic_reduction(type);
      if (!Comm::supports(config.reduction, type)) {
        throw std::invalid_argument("shardopt: config.reduction: " + std::string(Comm::name) + " has no " +
                                    std::string(name_of(config.reduction)) + " reduction of " +
                                    std::string(name_of(type)) + "; leave it automatic (" +
                                    std::string(name_of(Comm::automatic_reduction(type))) + ")");
      }
      return config.reduction;
    }

    static bool keeps_state(const Config& config) {
      for (const auto& group : config.groups) {
        if (!stateless(group.rule)) return true;
      }
      return false;
    }

    static std::vector<std::string> names(const Config& config) {
      std::vector<std::string> result;
      for (const auto& group : config.groups) result.push_back(group.name);
      return result;
    }
  };

  template <class P, class G>
  static FlatBuffers<Param, Grad> converted(const FlatBuffers<P, G>& flat) {
    return {reinterpret_cast<Param*>(flat.parameters), reinterpret_cast<Grad*>(flat.gradients)};
  }
  template <class P, class G>
  static SeparateBuffers<Param, Grad> converted(const SeparateBuffers<P, G>&) {
    return {};
  }

  template <template <class, class> class Buffers, class P, class G>
  static constexpr bool types_match(const Buffers<P, G>*) {
    return dtype_of<P> == dtype_of<Param> && dtype_of<G> == dtype_of<Grad>;
  }
  template <class Buffers>
  static constexpr void require_types() {
    static_assert(types_match(static_cast<const Buffers*>(nullptr)),
                  "shardopt: the buffers' element types are not those of the precision policy");
  }

  void require_states(const StateBuffers& adopted) const {
    const auto& wanted = memory_plan().buffers;
    for (const auto& [name, pointer] : adopted.buffers) {
      bool known = false;
      for (const auto& buffer : wanted) known = known || buffer.name == name;
      if (!known)
        throw std::invalid_argument("shardopt: StateBuffers names " + detail::quoted(name) +
                                    ", which this optimizer does not keep");
      if (pointer == nullptr && memory_plan().owned_parameters > 0) {
        throw std::invalid_argument("shardopt: StateBuffers holds a null pointer for " +
                                    detail::quoted(name));
      }
    }
    for (const auto& buffer : wanted) {
      bool given = false;
      for (const auto& [name, pointer] : adopted.buffers) given = given || name == buffer.name;
      if (!given) throw std::invalid_argument("shardopt: StateBuffers lacks " + detail::quoted(buffer.name));
    }
  }

  void attach_memory(const Arena& arena, const StateBuffers* adopted, bool given) {
    const MemoryPlan& plan = memory_plan();
    memory_.emplace(comm_.device(), plan, arena, given, config_.observer);
    const detail::ArenaOffsets& at = prepared_.memory.offsets;
    state_ = memory_->template at<detail::StepState>(at.state);
    rules_ = memory_->template at<Rule>(at.rules);
    constants_ = memory_->template at<typename Rule::Constants>(at.constants);
    scratch_ = memory_->template at<std::byte>(at.scratch);
    for (const auto& buffer : plan.buffers) {
      float* pointer = adopted == nullptr ? memory_->template at<float>(buffer.offset_bytes) : nullptr;
      for (std::size_t k = 0; adopted != nullptr && k < adopted->buffers.size(); ++k) {
        if (adopted->buffers[k].first == buffer.name) pointer = adopted->buffers[k].second;
      }
      state_buffers_.push_back(pointer);
    }
  }

  void start(Stream stream, bool initialize) {
    const Device& device = comm_.device();
    summed_ = device.make_event();
    decided_ = device.make_event();
    updated_ = device.make_event();
    device.record(decided_, stream);
    device.wait(comm_.stream(), decided_);
    detail::describe_setup<Rule, Sharding, Precision>(table_, config_, prepared_.reduction, prepared_.layout)
        .require_agreement(comm_, scratch_);
    if (config_.initial_parameters == InitialParameters::broadcast)
      detail::broadcast_parameters(comm_, table_, buffers_);
    if (config_.initial_parameters == InitialParameters::verify) {
      detail::require_equal_parameters(comm_, table_, buffers_, scratch_);
    }
    upload_tables();
    if (initialize) initialize_states();
    reducer_.emplace(prepared_.layout, buffers_, tiles_, prepared_.reduction,
                     typename Reducer::Memory{
                         memory_->template at<Grad>(prepared_.memory.offsets.staging),
                         memory_->template at<std::byte>(prepared_.memory.offsets.workspace), state_->words},
                     config_.observer);
    gatherer_.emplace(prepared_.layout, buffers_, tiles_,
                      memory_->template at<Param>(prepared_.memory.offsets.staging), device);
    tickets_ =
        std::make_shared<detail::TicketRing<Device>>(device, waiter(), memory_->pinned(), config_.observer);
    rules_digest_ = detail::digest_of_rules(config_.groups);
    announced_.assign(table_.size(), false);
    collect_owned();
    collect_gradient_runs();
    device.synchronize(comm_.stream());
  }

  void upload_tables() {
    const Device& device = comm_.device();
    const Stream stream = comm_.stream();
    std::vector<Tile> map;
    const Tile* base = memory_->template at<Tile>(prepared_.memory.offsets.map);
    tiles_ = detail::build_tiles(prepared_.layout, buffers_, base, map);
    device.upload(const_cast<Tile*>(base), map.data(), static_cast<std::int64_t>(map.size() * sizeof(Tile)),
                  stream);
    std::vector<Rule> rules;
    for (const auto& group : config_.groups) rules.push_back(group.rule);
    device.upload(rules_, rules.data(), static_cast<std::int64_t>(rules.size() * sizeof(Rule)), stream);
    device.fill_zero(state_, sizeof(detail::StepState), stream);
    device.invoke(detail::InitializeStep{state_, config_.loss_scale.value_or(DynamicLossScale{}),
                                         config_.loss_scale.has_value()},
                  stream);
  }

  void initialize_states() {
    const Device& device = comm_.device();
    const auto& buffers = memory_plan().buffers;
    for (std::size_t k = 0; k < buffers.size(); ++k) {
      if (buffers[k].name == "master") continue;
      device.fill_zero(state_buffers_[k], buffers[k].bytes, comm_.stream());
    }
    if constexpr (Precision::has_master) {
      for (const detail::BucketTiles& bucket : tiles_) {
        device.template initialize_masters<Param>(bucket.updated.tiles, bucket.updated.count, master(),
                                                  comm_.stream());
      }
    }
  }

  void collect_owned() {
    for (const detail::Bucket& bucket : prepared_.layout.buckets()) {
      for (const detail::Segment& segment : prepared_.layout.updated(bucket)) {
        const auto& entry = table_.entries()[segment.entry];
        const Range range{segment.flat.begin - entry.flat.begin, segment.flat.end - entry.flat.begin};
        if (!owned_.empty() && owned_.back().name.data() == entry.name.data() &&
            owned_.back().range.end == range.begin) {
          owned_.back().range.end = range.end;
        } else {
          owned_.push_back({entry.name, range});
        }
      }
    }
  }

  void collect_gradient_runs() {
    for (std::uint32_t k = 0; k < table_.size(); ++k) {
      const auto& entry = table_.entries()[k];
      if (entry.flat.empty()) continue;
      Grad* gradient = buffers_.gradient(k);
      if (!gradient_runs_.empty() && gradient_runs_.back().first + gradient_runs_.back().second == gradient) {
        gradient_runs_.back().second += entry.numel;
      } else {
        gradient_runs_.emplace_back(gradient, entry.numel);
      }
    }
  }

  [[nodiscard]] float* master() const noexcept {
    return Precision::has_master ? state_buffers_.back() : nullptr;
  }

  [[nodiscard]] std::vector<std::uint32_t> unannounced(std::span<const ParameterId> ids) const {
    std::vector<std::uint32_t> entries;
    for (const ParameterId id : ids) {
      const std::uint32_t entry = table_.storage_of(id).index;
      if (table_.entries()[entry].frozen) continue;
      if (announced_[entry] || std::find(entries.begin(), entries.end(), entry) != entries.end()) {
        throw std::invalid_argument(
            "shardopt: the gradient of parameter " + detail::quoted(table_.entries()[entry].name) +
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
    throw std::invalid_argument("shardopt: no group is named " + detail::quoted(group));
  }

  static void validate(const StepOptions& options) {
    if (!math::is_finite(options.lr_factor))
      throw std::invalid_argument("shardopt: lr_factor must be finite");
    if (options.gradient_scale.pointer() == nullptr && !math::is_finite(options.gradient_scale.value())) {
      throw std::invalid_argument("shardopt: gradient_scale must be finite");
    }
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
    require_working();
    if (!reduced_) throw std::logic_error("shardopt: apply() or discard() without reduce() before");
    require_capturable(options, stream);
    return guarded(discard ? "discard" : "apply", [&] {
      const Device& device = comm_.device();
      detail::StepInputs in = inputs(options, stream);
      in.discard = discard;
      enter("the decision");
      const StepTicket ticket = issue(stream, [&](StepResult* slot) {
        device.invoke(detail::DecideStep<Rule>{state_, in, rules_, constants_,
                                               static_cast<int>(config_.groups.size()), slot},
                      stream);
        decided_only_ = true;
      });
      if (!discard) update_and_gather(stream);
      decided_only_ = false;
      device.record(updated_, stream);
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
    for (std::size_t b = 0; b < tiles_.size(); ++b) {
      enter("the update of bucket " + std::to_string(b));
      if (tiles_[b].updated.count > 0) {
        comm_.device().update(update_arguments(tiles_[b].updated), stream);
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

  [[nodiscard]] UpdateArguments<Rule, Precision> update_arguments(detail::TileRun tiles) const noexcept {
    UpdateArguments<Rule, Precision> arguments{.tiles = tiles.tiles,
                                               .tile_count = tiles.count,
                                               .states = {},
                                               .master = master(),
                                               .constants = constants_,
                                               .verdict = &state_->verdict,
                                               .stateful = prepared_.stateful};
    if (prepared_.stateful) {
      for (std::size_t k = 0; k != state_count<Rule>; ++k) arguments.states[k] = state_buffers_[k];
    }
    return arguments;
  }

  void wait_bucket(std::size_t bucket, Stream stream) const {
    if (gathering_) gatherer_->wait(bucket, stream, comm_.device());
  }

  void require_working() const {
    if (broken_) std::rethrow_exception(broken_);
  }

  /// How the host waits for the device: the collective's way, where it watches for failures.
  [[nodiscard]] std::function<void(const typename Device::Event&)> waiter() const {
    if constexpr (requires { comm_.waiter(); }) {
      return comm_.waiter();
    } else {
      return [device = comm_.device()](const typename Device::Event& event) { device.synchronize(event); };
    }
  }

  /// Notes what is being done, for messages, and tells the collective.
  void enter(std::string what) {
    position_ = std::move(what);
    if constexpr (requires { comm_.label(position_); }) {
      comm_.label("iteration " + std::to_string(iteration_ + 1) + ", " + position_);
    }
  }

  /// Runs what enqueues. A failure in it breaks the optimizer.
  template <class Body>
  auto guarded(std::string_view call, const Body& body) -> decltype(body()) {
    try {
      position_.clear();
      if constexpr (requires { comm_.throw_if_failed(); }) comm_.throw_if_failed();
      return body();
    } catch (Error& error) {
      error.add_context(text_of_failure(call));
      broken_ = std::current_exception();
      give_up(error.what());
    } catch (const std::exception& error) {
      const std::string text = std::string(error.what()) + "; " + text_of_failure(call);
      broken_ = std::make_exception_ptr(Error(text));
      give_up(text);
    } catch (...) {
      const std::string text = "shardopt: an unknown exception; " + text_of_failure(call);
      broken_ = std::make_exception_ptr(Error(text));
      give_up(text);
    }
    std::rethrow_exception(broken_);
  }

  /// Lets the other ranks know that this one goes no further.
  void give_up(const std::string& text) {
    if constexpr (requires { comm_.abort(text); }) comm_.abort(text);
  }

  [[nodiscard]] std::string text_of_failure(std::string_view call) const {
    return "rank " + std::to_string(comm_.rank()) + ", iteration " + std::to_string(iteration_ + 1) +
           ", in " + std::string(call) + (position_.empty() ? "" : ": " + position_) +
           "; the optimizer is broken";
  }

  using Reducer = detail::GradientReducer<Comm, Param, Grad>;
  using Gatherer = detail::ParameterGatherer<Comm, Param, Grad>;

  Comm comm_;
  ParameterTable table_;
  Config config_;
  Prepared prepared_;
  detail::EngineBuffers<Param, Grad> buffers_;
  std::optional<detail::OwnedMemory<Device>> memory_;
  detail::StepState* state_ = nullptr;
  Rule* rules_ = nullptr;
  typename Rule::Constants* constants_ = nullptr;
  std::byte* scratch_ = nullptr;
  std::vector<float*> state_buffers_;
  std::vector<detail::BucketTiles> tiles_;
  std::optional<Reducer> reducer_;
  std::optional<Gatherer> gatherer_;
  std::shared_ptr<detail::TicketRing<Device>> tickets_;
  typename Device::Event summed_;   ///< behind the all-reduce, on the collective's stream
  typename Device::Event decided_;  ///< behind the decision, on the step's stream
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
  std::string position_;
  std::exception_ptr broken_;
};

}  // namespace shardopt::inline v0
