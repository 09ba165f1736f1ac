// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/zero/memory_plan.hpp>
#include <shardopt/zero/step_result.hpp>

#include <cstdint>
#include <string_view>

namespace shardopt::inline v0 {

/// Is told what an optimizer does; the library itself never prints. Called on the thread that calls the
/// optimizer. Override what is of interest.
///
/// An exception thrown here leaves through that call, and counts as its failure: thrown by bucket_reduced it
/// breaks the optimizer in the middle of a step, as a failing collective does, and the other ranks are told;
/// by what is called during construction it ends that. step_skipped is called by StepTicket::get, and breaks
/// nothing.
class Observer {
 public:
  virtual ~Observer() = default;

  /// The library is about to allocate; not called where the engine gives all memory.
  virtual void before_allocation(const MemoryPlan& /*plan*/) {}
  /// It has allocated.
  virtual void after_allocation(const MemoryPlan& /*plan*/) {}
  /// The reduction of a bucket was enqueued (on the host: is done): its index, and the bytes of its
  /// gradients.
  virtual void bucket_reduced(std::int64_t /*bucket*/, std::int64_t /*bytes*/) {}
  /// A ticket was collected whose step was skipped (or, after reduce(), is to be); once for each step.
  virtual void step_skipped(const StepResult& /*result*/) {}
  /// Something is legal and probably not meant.
  virtual void warning(std::string_view /*text*/) {}
};

}  // namespace shardopt::inline v0
