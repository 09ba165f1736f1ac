// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/collective.hpp>
#include <shardopt/core/error.hpp>
#include <shardopt/core/math.hpp>
#include <shardopt/core/parameter_table.hpp>
#include <shardopt/precision/precision_policy.hpp>
#include <shardopt/rules/rule.hpp>
#include <shardopt/sharding/sharding_policy.hpp>
#include <shardopt/zero/announcements.hpp>
#include <shardopt/zero/bucket_buffers.hpp>
#include <shardopt/zero/config.hpp>
#include <shardopt/zero/failure_latch.hpp>
#include <shardopt/zero/gradient_reducer.hpp>
#include <shardopt/zero/host_wait.hpp>
#include <shardopt/zero/parameter_gatherer.hpp>
#include <shardopt/zero/preparation.hpp>
#include <shardopt/zero/rank_state.hpp>
#include <shardopt/zero/step_control.hpp>
#include <shardopt/zero/step_result.hpp>
#include <shardopt/zero/step_state.hpp>
#include <shardopt/zero/stream_ends.hpp>
#include <shardopt/zero/ticket.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace shardopt::inline v0::detail {

/// How a step ends.
enum class StepEnd : std::uint8_t {
  step,     ///< in the call that reduced, too
  apply,    ///< in a call of its own
  discard,  ///< likewise, without an update
};

/// What a rank enqueues for its steps, in which order and behind what.
///
/// The step's memory on the device (StepState) is written on the engine's streams and on the collective's.
/// Two rules order that: a step's stream goes on behind the all-reduce of the collective's stream, and the
/// collective's stream goes on behind what was put on an engine's stream (keep_behind, or a gather).
template <OptimizerRule Rule, ShardingPolicy Sharding, Collective Comm, PrecisionPolicy Precision>
class StepPipeline {
 public:
  using Device = typename Comm::Device;
  using Stream = typename Device::Stream;
  using Param = typename Precision::Param;
  using Grad = typename Precision::Grad;
  using State = RankState<Rule, Precision, Device>;

  /// All arguments must outlive this. Enqueues nothing.
  StepPipeline(Comm& comm, const ParameterTable& table, const OptimizerConfig<Rule, Sharding>& config,
               const Preparation<Rule, Sharding, Comm, Precision>& prepared,
               const EngineBuffers<Param, Grad>& buffers, const State& state)
      : comm_(comm),
        table_(table),
        config_(config),
        prepared_(prepared),
        state_(state),
        announcements_(table),
        reducer_(prepared.layout, buffers, state.tiles(), prepared.reduction,
                 {state.template staging<Grad>(), state.workspace(), state.control()->words},
                 config.observer),
        gatherer_(prepared.layout, buffers, state.tiles(), state.template staging<Param>(), comm.device()),
        tickets_(std::make_shared<TicketRing<Device>>(comm.device(), waiter_of(comm), state.pinned(),
                                                      config.observer)),
        offered_(comm.device().make_event()),
        summed_(comm.device().make_event()),
        measured_(comm.device().make_event()),
        updated_(comm.device().make_event()),
        behind_(comm.device().make_event()) {}
  StepPipeline(const StepPipeline&) = delete;
  StepPipeline& operator=(const StepPipeline&) = delete;

  /// Waits for what was enqueued; whether it ended. If not, a device may use the rank's memory for ever.
  [[nodiscard]] bool finish_all() noexcept {
    tickets_->close();
    const Device& device = comm_.device();
    try {
      device.record(summed_, comm_.stream());
      const HostWait<Device> wait = waiter_of(comm_);
      wait(summed_);
      ends_.wait(wait);
      return true;
    } catch (...) {
      // The failure was reported by the call that met it, or is the engine's next call's to report.
    }
    if (is_stuck(comm_)) return false;
    device.finish(comm_.stream());
    ends_.wait([&](const typename Device::Event& end) { device.finish(end); });
    return true;
  }

  /// @throws the first failure, if there was one
  void require_working() const { latch_.require_working(); }

  /// @throws std::logic_error if gradients of a step were announced or reduced already
  void require_between_steps(std::string_view call) const {
    latch_.require_working();
    if (reduced_ || announcements_.any()) {
      throw std::logic_error("shardopt: " + std::string(call) +
                             " in the middle of a step: gradients were announced or reduced; call it after "
                             "step(), apply() or discard()");
    }
  }

  /// @throws std::logic_error before (`reduced`) or after reduce()
  void require_reduced(bool reduced, std::string_view call) const {
    if (reduced_ == reduced) return;
    throw std::logic_error(
        "shardopt: " + std::string(call) +
        (reduced ? " without reduce() before" : " after reduce(); call apply() or discard() first"));
  }

  /// @throws std::logic_error if `stream` is in a capture
  void require_uncaptured(std::string_view call, Stream stream) const {
    if (comm_.device().capture_of(stream) == 0) return;
    throw std::logic_error("shardopt: " + std::string(call) +
                           " in a stream capture: it works at once, not with each replay; call it outside");
  }

  /// Refuses what a capture cannot hold, or would hold wrongly. @throws std::logic_error,
  /// std::invalid_argument
  void require_capturable(const StepOptions& options, Stream stream) const {
    const std::uint64_t capture = comm_.device().capture_of(stream);
    require_capturable(capture);
    if (capture != 0 && (!math::equal(options.lr_factor, 1.0f) || !options.gradient_scale.is_one())) {
      throw std::invalid_argument(
          "shardopt: a captured step takes its factors from set_inputs(), called before each replay; "
          "leave StepOptions' lr_factor and gradient_scale at 1");
    }
    if (!reduced_) return reducer_.require_capture(capture);
    if (capture != capture_) {
      throw std::logic_error(
          "shardopt: reduce() and its apply() or discard() must be in the same stream capture, or in none");
    }
  }

  /// gradient_ready(): reduces the buckets that are whole.
  void announce(std::span<const ParameterId> ids, Stream stream) {
    require_capturable(comm_.device().capture_of(stream));
    const std::vector<std::uint32_t> entries = announcements_.note(ids);
    guarded("gradient_ready", [&] {
      for (const std::uint32_t entry : entries) {
        reducer_.announce(table_.entries()[entry].flat, stream, comm_.device());
      }
      reduce_whole_buckets();
    });
  }

  /// A whole step. @pre require_capturable()
  StepTicket step(const StepOptions& options, Stream stream) {
    guarded("reduce", [&] {
      const StepInputs in = inputs(options, stream);
      sum_up(in, stream);
      comm_.device().invoke(MeasureStep{state_.control(), in, nullptr}, stream);
      note_reduced(stream);
    });
    return finish(options, stream, StepEnd::step);
  }

  /// The first half of a step. @pre require_capturable()
  StepTicket reduce(const StepOptions& options, Stream stream) {
    return guarded("reduce", stream, [&] {
      const StepInputs in = inputs(options, stream);
      sum_up(in, stream);
      const StepTicket ticket = issue(stream, [&](StepResult* slot) {
        comm_.device().invoke(MeasureStep{state_.control(), in, slot}, stream);
      });
      comm_.device().record(measured_, stream);
      note_reduced(stream);
      return ticket;
    });
  }

  /// The second half. @pre require_capturable()
  StepTicket finish(const StepOptions& options, Stream stream, StepEnd end) {
    const bool discard = end == StepEnd::discard;
    return guarded(discard ? "discard" : "apply", stream, [&] {
      const Device& device = comm_.device();
      StepInputs in = inputs(options, stream);
      in.discard = discard;
      in.late_lr = end == StepEnd::apply && !in.factors_on_device;
      enter("the decision");
      if (!(measured_on_ == stream)) device.wait(stream, measured_);
      const StepTicket ticket = issue(stream, [&](StepResult* slot) {
        device.invoke(DecideStep<Rule>{state_.control(), in, state_.rules(), state_.constants(),
                                       static_cast<int>(config_.groups.size()), slot},
                      stream);
        decided_only_ = !in.factors_on_device;
      });
      if (!discard) update_and_gather(stream);
      decided_only_ = false;
      device.record(updated_, stream);
      // The next step's sums must find those of this one cleared. Where parameters were gathered the
      // collective's stream is behind the last update anyway.
      const bool gathered = !discard && !prepared_.layout.updates_everything() && !state_.tiles().empty();
      if (!gathered) keep_behind(stream);
      if (in.factors_on_device) join(stream);
      close_step();
      return ticket;
    });
  }

  /// Parameters made anew from `bucket`, by bucket, then gathered.
  template <class Make>
  void remake_parameters(const Make& make, Stream stream) {
    for (std::size_t b = 0; b < state_.tiles().size(); ++b) {
      make(b);
      gatherer_.gather(comm_, b, stream);
    }
    gathering_ = true;
    note_update(stream);
  }

  /// States or parameters were written on `stream`: the next step comes behind it.
  void note_update(Stream stream) {
    comm_.device().record(updated_, stream);
    stepped_ = true;
    keep_behind(stream);
  }

  /// `stream` goes on behind the last update.
  void wait_for_update(Stream stream) const {
    if (stepped_) comm_.device().wait_in_capture(stream, updated_);
  }

  /// `stream` goes on behind the last update and what it gathered.
  void settle(Stream stream) const {
    wait_for_update(stream);
    wait_buckets(bucket_count(), stream);
  }

  /// Buckets come in ascending order, on one stream: who waits for one has waited for those before it.
  /// @throws std::logic_error for a wait that a capture cannot hold
  void wait_buckets(std::int64_t end, Stream stream) const {
    if (!gathering_ || end == 0) return;
    gatherer_.require_waitable(static_cast<std::size_t>(end - 1), stream, comm_.device());
    gatherer_.wait(static_cast<std::size_t>(end - 1), stream, comm_.device());
  }
  [[nodiscard]] std::int64_t bucket_count() const noexcept {
    return static_cast<std::int64_t>(prepared_.layout.buckets().size());
  }

  /// The collective's stream goes on behind what `stream` holds now: at the start, and wherever its next work
  /// needs that. (Not across the border of a capture: graphs are ordered by the streams they are launched
  /// in.)
  void keep_behind(Stream stream) {
    const Device& device = comm_.device();
    if (device.capture_of(stream) != device.capture_of(comm_.stream())) return;
    device.record(behind_, stream);
    device.wait(comm_.stream(), behind_);
  }

  /// Enqueues what writes a result, by `write(slot)`, and gives its ticket. In a capture there is none: a
  /// replay cannot know which slot is free.
  template <class Write>
  StepTicket issue(Stream stream, const Write& write) {
    if (comm_.device().capture_of(stream) != 0) {
      write(static_cast<StepResult*>(nullptr));
      return StepTicket(tickets_, TicketSource::captured);
    }
    write(tickets_->claim());
    tickets_->mark(stream);
    return StepTicket(tickets_, tickets_->last());
  }

  /// The counters that hold: those before a decision whose update was never enqueued. Waits for what `stream`
  /// holds and for the last step; on a broken optimizer too, unless that may take for ever.
  [[nodiscard]] StepCounters counters(Stream stream) const {
    const Device& device = comm_.device();
    wait_for_update(stream);
    typename Device::Event event = device.make_event();
    device.record(event, stream);
    try {
      waiter_of(comm_)(event);
    } catch (const CollectiveError&) {
      if (is_stuck(comm_)) throw;
      device.synchronize(event);
    }
    StepCounters result;
    device.download(&result, decided_only_ ? &state_.control()->before : &state_.control()->counters,
                    sizeof result, stream);
    return result;
  }

  /// Iterations are counted on from here.
  void recount(std::int64_t iteration) noexcept {
    iteration_ = iteration;
    tickets_->recount();
  }

  /// Runs what has effects. A failure in it breaks the optimizer.
  template <class Body>
  auto guarded(std::string_view call, const Body& body) {
    return latch_.run(comm_, iteration_ + 1, call, body);
  }
  /// Likewise what enqueues on one of the engine's streams.
  template <class Body>
  auto guarded(std::string_view call, Stream stream, const Body& body) {
    return guarded(call, [&] { return run_to_the_end(body, [&] { ends_.mark(stream, comm_.device()); }); });
  }

 private:
  void require_capturable(std::uint64_t capture) const {
    if constexpr (!capturable<Comm>) {
      if (capture != 0) {
        throw std::logic_error("shardopt: a step over " + std::string(Comm::name) +
                               " cannot be captured: its ranks meet on the host; capture with Nccl");
      }
    }
    const std::uint64_t other = comm_.device().capture_of(comm_.stream());
    if (other != 0 && other != capture) {
      throw std::logic_error(
          "shardopt: the collective's stream is in a capture that the step's stream is not in");
    }
  }

  [[nodiscard]] StepInputs inputs(const StepOptions& options, Stream stream) const {
    StepInputs in{.factors = factors_of(options.lr_factor, options.gradient_scale),
                  .factors_on_device = comm_.device().capture_of(stream) != 0,
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
      enter("the reduction of bucket", reducer_.next());
    } while (reducer_.reduce_next(comm_));
  }

  /// Reduces what is left, and adds up what all ranks must know.
  void sum_up(const StepInputs& in, Stream stream) {
    const Device& device = comm_.device();
    reducer_.announce_rest(stream, device);
    reduce_whole_buckets();
    enter("the all-reduce of the norm");
    // What the engine wrote on the step's stream is read on the collective's; a capture must reach it, too.
    if (in.factors_on_device || in.reads_engine_memory()) {
      device.record(offered_, stream);
      device.wait(comm_.stream(), offered_);
    }
    device.invoke(OpenStep{state_.control(), in}, comm_.stream());
    comm_.all_reduce(state_.control()->words, control_word::count);
    device.record(summed_, comm_.stream());
    device.wait(stream, summed_);
  }

  void note_reduced(Stream stream) {
    measured_on_ = stream;
    capture_ = comm_.device().capture_of(stream);
    reduced_ = true;
  }

  void update_and_gather(Stream stream) {
    const std::vector<BucketTiles>& tiles = state_.tiles();
    for (std::size_t b = 0; b < tiles.size(); ++b) {
      const auto bucket = static_cast<std::int64_t>(b);
      enter("the update of bucket", bucket);
      if (tiles[b].updated.count > 0) {
        comm_.device().update(state_.update_arguments(tiles[b].updated, prepared_.stateful), stream);
      }
      decided_only_ = false;  // where this rank updates nothing it gets what others have updated
      enter("the gather of bucket", bucket);
      gatherer_.gather(comm_, b, stream);
    }
    gathering_ = true;
  }

  /// Brings the collective's stream back into `stream`: a capture must end in the stream that it began in.
  void join(Stream stream) {
    comm_.device().record(summed_, comm_.stream());
    comm_.device().wait(stream, summed_);
  }

  void close_step() noexcept {
    stepped_ = true;
    reduced_ = false;
    announcements_.clear();
    reducer_.restart();
    ++iteration_;
  }

  /// Notes what is being done, for messages.
  void enter(const char* what, std::int64_t index = -1) {
    latch_.enter(comm_, Position{iteration_ + 1, what, index});
  }

  Comm& comm_;
  const ParameterTable& table_;
  const OptimizerConfig<Rule, Sharding>& config_;
  const Preparation<Rule, Sharding, Comm, Precision>& prepared_;
  const State& state_;
  Announcements announcements_;
  GradientReducer<Comm, Param, Grad> reducer_;
  ParameterGatherer<Comm, Param, Grad> gatherer_;
  std::shared_ptr<TicketRing<Device>> tickets_;
  typename Device::Event offered_;  ///< behind what the engine wrote for the all-reduce, on the step's stream
  typename Device::Event summed_;   ///< behind the all-reduce, on the collective's stream
  typename Device::Event measured_;  ///< behind reduce(), on its stream
  typename Device::Event updated_;   ///< behind the last update, on the step's stream
  typename Device::Event behind_;    ///< what the collective's stream was told to wait for
  StreamEnds<Device> ends_;
  std::optional<Stream> measured_on_;  ///< reduce()'s stream
  std::uint64_t capture_ = 0;          ///< that reduce() was in
  std::int64_t iteration_ = 0;
  bool reduced_ = false;
  bool stepped_ = false;
  bool decided_only_ = false;  ///< a decision was enqueued, but no update yet
  bool gathering_ = false;
  FailureLatch latch_;
};

}  // namespace shardopt::inline v0::detail
