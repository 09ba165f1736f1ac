// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/collective.hpp>

#include <functional>

namespace shardopt::inline v0::detail {

/// How the host waits for an event.
template <class Device>
using HostWait = std::function<void(const typename Device::Event&)>;

/// The collective's way, where it watches for failures; the device's elsewhere.
template <Collective Comm>
[[nodiscard]] HostWait<typename Comm::Device> waiter_of(const Comm& comm) {
  if constexpr (requires { comm.waiter(); }) {
    return comm.waiter();
  } else {
    return [device = comm.device()](const typename Comm::Device::Event& event) { device.synchronize(event); };
  }
}

/// Waits for what `stream` holds now. @throws what the collective's waiter throws, if it has one
template <Collective Comm>
void wait_for(const Comm& comm, typename Comm::Device::Stream stream) {
  typename Comm::Device::Event event = comm.device().make_event();
  comm.device().record(event, stream);
  waiter_of(comm)(event);
}

/// Whether work on a device may wait for a lost peer for ever.
template <Collective Comm>
[[nodiscard]] bool is_stuck(const Comm& comm) noexcept {
  if constexpr (requires { comm.stuck(); }) {
    return comm.stuck();
  } else {
    return false;
  }
}

/// Whether the collective's calls can be part of a CUDA graph.
template <Collective Comm>
inline constexpr bool capturable = [] {
  if constexpr (requires { Comm::capturable; }) {
    return Comm::capturable;
  } else {
    return true;
  }
}();

}  // namespace shardopt::inline v0::detail
