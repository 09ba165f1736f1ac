// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/error.hpp>
#include <shardopt/zero/host_wait.hpp>
#include <shardopt/zero/observer.hpp>
#include <shardopt/zero/step_result.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace shardopt::inline v0 {
namespace detail {

/// Where tickets find their results.
class TicketSource {
 public:
  virtual ~TicketSource() = default;
  virtual StepResult collect(std::int64_t sequence) = 0;

  /// The number of a ticket that a captured step gives.
  static constexpr std::int64_t captured = -1;
};

}  // namespace detail

/// The result of a step that may still be running on the device.
class StepTicket {
 public:
  /// Made by an optimizer.
  StepTicket(std::shared_ptr<detail::TicketSource> source, std::int64_t sequence)
      : source_(std::move(source)), sequence_(sequence) {}

  /// Waits until the device has decided the step (on CUDA: the only wait there is) and gives its result. May
  /// be called again.
  /// @throws Error if 64 later tickets have been issued, or the optimizer is gone
  /// @throws Error if the step was skipped, and the loss scale would have fallen below its minimum
  [[nodiscard]] StepResult get() const { return source_->collect(sequence_); }

 private:
  std::shared_ptr<detail::TicketSource> source_;
  std::int64_t sequence_;
};

namespace detail {

/// Results of the last steps in page-locked memory, written by the device, each with an event that says when.
template <class Device>
class TicketRing final : public TicketSource {
 public:
  static constexpr std::int64_t slots = 64;
  static constexpr std::int64_t pinned_bytes = slots * static_cast<std::int64_t>(sizeof(StepResult));

  TicketRing(const Device& device, HostWait<Device> wait, void* pinned, Observer* observer)
      : device_(device),
        wait_(std::move(wait)),
        results_(static_cast<StepResult*>(pinned)),
        observer_(observer) {
    for (Entry& entry : entries_) entry.written = device_.make_event();
  }

  /// Claims a slot: where the device is to write the result.
  [[nodiscard]] StepResult* claim() noexcept {
    entries_[at(next_)].sequence = next_;
    return results_ + at(next_++);
  }

  /// After the write was enqueued on `stream`: marks the slot claimed last.
  void mark(typename Device::Stream stream) { device_.record(entries_[at(next_ - 1)].written, stream); }

  /// The number of the slot claimed last.
  [[nodiscard]] std::int64_t last() const noexcept { return next_ - 1; }

  /// The memory is about to go, and with it all that waits for it: a ticket kept for long must keep no
  /// communicator.
  void close() noexcept {
    results_ = nullptr;
    wait_ = nullptr;
    for (Entry& entry : entries_) entry = Entry{};
  }

  /// Iterations are counted anew: those to come were not told of.
  void recount() noexcept { told_.fill(0); }

  [[nodiscard]] StepResult collect(std::int64_t sequence) override {
    if (results_ == nullptr) throw Error("shardopt: the optimizer that issued this ticket is gone");
    if (sequence == captured) {
      throw Error("shardopt: a captured step has no result of its own; ask last_result() after a replay");
    }
    const Entry& entry = entries_[at(sequence)];
    if (entry.sequence != sequence) {
      throw Error("shardopt: this ticket is too old: " + std::to_string(slots) +
                  " later ones have been issued");
    }
    wait_(entry.written);
    const StepResult result = results_[at(sequence)];
    if (result.skipped && observer_ != nullptr) tell_once(result);
    if (result.loss_scale_exhausted) {
      throw Error("shardopt: the gradient is not finite at the smallest loss scale, " +
                  std::to_string(result.loss_scale) + " (iteration " + std::to_string(result.iteration) +
                  ")");
    }
    return result;
  }

 private:
  struct Entry {
    std::int64_t sequence = -1;
    typename Device::Event written = {};
  };

  /// A step may have several tickets, and a ticket may be asked again.
  void tell_once(const StepResult& result) {
    std::int64_t& told = told_[at(result.iteration)];
    if (told == result.iteration) return;
    told = result.iteration;
    observer_->step_skipped(result);
  }

  [[nodiscard]] static std::size_t at(std::int64_t sequence) noexcept {
    return static_cast<std::size_t>(sequence % slots);
  }

  Device device_;
  HostWait<Device> wait_;
  StepResult* results_;
  Observer* observer_;
  std::array<Entry, slots> entries_;
  std::array<std::int64_t, slots> told_{};  ///< iterations of the skipped steps that the observer knows
  std::int64_t next_ = 0;
};

}  // namespace detail
}  // namespace shardopt::inline v0
