// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>
#include <utility>
#include <vector>

namespace shardopt::inline v0::detail {

/// The library's last work on each of the engine's streams: what must be over before its memory goes.
template <class Device>
class StreamEnds {
 public:
  using Stream = typename Device::Stream;
  using Event = typename Device::Event;

  /// What `stream` holds now may be the library's. Nothing in a capture: replays are the engine's to wait
  /// for.
  void mark(Stream stream, const Device& device) {
    if (device.capture_of(stream) != 0) return;
    for (auto& [known, end] : ends_) {
      if (known == stream) return device.record(end, stream);
    }
    ends_.emplace_back(stream, device.make_event());
    device.record(ends_.back().second, stream);
  }

  /// Waits for all of them, by `wait(event)`.
  template <class Wait>
  void wait(const Wait& wait) const {
    for (const auto& [stream, end] : ends_) wait(end);
  }

 private:
  std::vector<std::pair<Stream, Event>> ends_;
};

/// Runs `body`, then `end`, whatever the body throws. @return what the body gives
template <class Body, class End>
auto run_to_the_end(const Body& body, const End& end) -> decltype(body()) {
  try {
    if constexpr (std::is_void_v<decltype(body())>) {
      body();
      end();
    } else {
      auto result = body();
      end();
      return result;
    }
  } catch (...) {
    try {
      end();
    } catch (...) {
      // What the body threw counts.
    }
    throw;
  }
}

}  // namespace shardopt::inline v0::detail
