// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/collective.hpp>
#include <shardopt/core/error.hpp>
#include <shardopt/devices/host.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// A device whose streams and captures are a protocol: work is done at once on the host (in a capture: when
/// the graph is replayed), and noted with all that it comes behind, as streams and events promise it.
namespace test {

namespace so = shardopt;

/// How much of each stream has happened: by stream, the number of the last work on it.
using StreamClock = std::map<int, std::int64_t>;

inline void merge(StreamClock& into, const StreamClock& other) {
  for (const auto& [stream, count] : other) into[stream] = (std::max)(into[stream], count);
}

/// What one rank's device was asked for.
struct OrderLog {
  struct Work {
    std::string what;
    int stream;
    std::int64_t number;  ///< on its stream
    StreamClock behind;
    std::uint64_t capture;
  };
  std::vector<Work> works;
  std::map<int, StreamClock> streams;
  StreamClock host;  ///< what the host has waited for
  std::map<int, std::uint64_t> captures;
  std::vector<std::function<void()>> graph;  ///< what was captured
  std::uint64_t last_capture = 0;
  std::int64_t enqueued = 0;  ///< works, records, waits
  std::int64_t allocated = 0;
  bool freed_early = false;  ///< memory went before the host had waited for all work outside captures
  std::string fail_in = {};  ///< work whose name holds this …
  int fail_at = 0;           ///< … throws the how-manyth time from now on; 0: none

  void begin_capture(int stream) { captures[stream] = ++last_capture; }
  void end_capture() { captures.clear(); }
  void replay() const {
    for (const auto& each : graph) each();
  }

  /// The n-th work from the end whose name holds a part.
  [[nodiscard]] const Work& last(std::string_view part, int n = 1) const {
    for (auto work = works.rbegin(); work != works.rend(); ++work) {
      if (work->what.find(part) != std::string::npos && --n == 0) return *work;
    }
    throw std::out_of_range("no such work: " + std::string(part));
  }
  [[nodiscard]] bool waited_for_all() const {
    return std::all_of(works.begin(), works.end(), [&](const Work& work) {
      const auto seen = host.find(work.stream);
      return work.capture != 0 || (seen != host.end() && seen->second >= work.number);
    });
  }
  void note(std::string what, int stream, std::function<void()> work) {
    ++enqueued;
    if (fail_at > 0 && what.find(fail_in) != std::string::npos && --fail_at == 0)
      throw so::Error("the device fails in " + fail_in);
    StreamClock& clock = streams[stream];
    const std::int64_t number = ++clock[stream];
    works.push_back({std::move(what), stream, number, clock, captures[stream]});
    if (captures[stream] == 0) return work();
    graph.push_back(std::move(work));
  }
};

/// Whether `b` can only begin when `a` is done.
[[nodiscard]] inline bool comes_behind(const OrderLog::Work& b, const OrderLog::Work& a) {
  const auto seen = b.behind.find(a.stream);
  return seen != b.behind.end() && seen->second >= a.number;
}

class OrderedDevice : public so::Host {
 public:
  struct Stream {
    int id = 0;
    operator so::Host::Stream() const { return {}; }  // NOLINT: implicit
    friend bool operator==(Stream, Stream) = default;
  };
  /// As of Cuda: what it marks outside captures and what in them are two things.
  struct Event {
    StreamClock outside = {};
    StreamClock within = {};
    std::uint64_t capture = 0;  ///< that the last record was part of
    [[nodiscard]] const StreamClock& behind() const { return capture == 0 ? outside : within; }
  };

  explicit OrderedDevice(std::shared_ptr<OrderLog> log) : log_(std::move(log)) {}

  [[nodiscard]] void* allocate(std::int64_t bytes) const {
    ++log_->allocated;
    void* memory = Host::allocate(bytes);
    note(memory);
    return memory;
  }
  void deallocate(void* memory) const {
    --log_->allocated;
    log_->freed_early = log_->freed_early || !log_->waited_for_all();
    Host::deallocate(memory);
  }
  [[nodiscard]] void* allocate_pinned(std::int64_t bytes) const { return allocate(bytes); }
  void deallocate_pinned(void* memory) const { deallocate(memory); }

  [[nodiscard]] Event make_event() const { return {}; }
  void record(Event& event, Stream stream) const {
    ++log_->enqueued;
    event.capture = log_->captures[stream.id];
    (event.capture == 0 ? event.outside : event.within) = log_->streams[stream.id];
  }
  void wait(Stream stream, const Event& event) const {
    ++log_->enqueued;
    std::uint64_t& capture = log_->captures[stream.id];
    if (event.capture == 0 && capture != 0) throw so::Error("a capture waits for an event outside it");
    if (event.capture != 0 && capture != 0 && event.capture != capture) throw so::Error("two captures meet");
    if (event.capture != 0) capture = event.capture;
    merge(log_->streams[stream.id], event.behind());
  }
  void wait_in_capture(Stream stream, const Event& event) const {
    if (event.capture == capture_of(stream)) return wait(stream, event);
    if (capture_of(stream) != 0) return;
    ++log_->enqueued;
    merge(log_->streams[stream.id], event.outside);
  }
  [[nodiscard]] std::uint64_t capture_of(Stream stream) const { return log_->captures[stream.id]; }
  [[nodiscard]] static std::uint64_t capture_of(const Event& event) { return event.capture; }
  void synchronize(const Event& event) const { merge(log_->host, event.outside); }
  void synchronize(Stream stream) const {
    if (capture_of(stream) != 0) throw so::Error("the host waits for a stream in a capture");
    merge(log_->host, log_->streams[stream.id]);
  }
  template <class StreamOrEvent>
  void finish(const StreamOrEvent& what) const noexcept {
    try {
      synchronize(what);
    } catch (const so::Error&) {
    }
  }

  void upload(void* to, const void* from, std::int64_t bytes, Stream stream) const {
    log_->note("upload", stream.id, [=] { Host{}.upload(to, from, bytes, {}); });
  }
  void download(void* to, const void* from, std::int64_t bytes, Stream stream) const {
    log_->note("download", stream.id, [=] { Host{}.download(to, from, bytes, {}); });
    synchronize(stream);
  }
  void copy(void* to, const void* from, std::int64_t bytes, Stream stream) const {
    log_->note("copy", stream.id, [=] { Host{}.copy(to, from, bytes, {}); });
  }
  void fill_zero(void* to, std::int64_t bytes, Stream stream) const {
    log_->note("fill_zero", stream.id, [=] { Host{}.fill_zero(to, bytes, {}); });
  }
  template <class Functor>
  void invoke(const Functor& functor, Stream stream) const {
    log_->note(__PRETTY_FUNCTION__, stream.id, [functor] { Host{}.invoke(functor, {}); });
  }
  template <class Rule, class Precision>
  void update(const so::UpdateArguments<Rule, Precision>& arguments, Stream stream) const {
    log_->note("update", stream.id, [arguments] { Host{}.update(arguments, {}); });
  }
  template <class Grad>
  void add_squares(const so::Tile* tiles, std::int64_t count, std::int64_t* limbs, std::int64_t* non_finite,
                   Stream stream) const {
    log_->note("add_squares", stream.id,
               [=] { Host{}.template add_squares<Grad>(tiles, count, limbs, non_finite, {}); });
  }

 private:
  /// What is left to the process on purpose stays reachable, so that no sanitizer calls it a leak.
  static void note(void* memory) {
    static std::mutex mutex;
    static std::vector<void*>& all = *new std::vector<void*>;
    const std::lock_guard lock(mutex);
    all.push_back(memory);
  }

  std::shared_ptr<OrderLog> log_;
};

/// What a rank's collective does when it fails.
struct LinkState {
  bool failed = false;
  bool may_abort = true;  ///< as a communicator of the library's own
  bool aborted = false;
  std::string told = {};  ///< by abort()
};

/// One rank on such a device, its collective on a stream of its own, watched for failures.
template <bool can_be_captured = true>
class OrderedLink {
 public:
  using Device = OrderedDevice;
  using Stream = Device::Stream;
  static constexpr std::string_view name = "ordered link";
  static constexpr bool capturable = can_be_captured;
  static constexpr Stream own_stream{100};

  OrderedLink(const std::shared_ptr<OrderLog>& log, std::shared_ptr<LinkState> state)
      : log_(log), state_(std::move(state)), device_(log) {}

  [[nodiscard]] int rank() const noexcept { return 0; }
  [[nodiscard]] int world() const noexcept { return 1; }
  [[nodiscard]] Stream stream() const noexcept { return own_stream; }
  [[nodiscard]] const Device& device() const noexcept { return device_; }
  [[nodiscard]] static bool supports(so::Reduction, so::Dtype) { return true; }
  [[nodiscard]] static so::Reduction automatic_reduction(so::Dtype) { return so::Reduction::ordered; }
  [[nodiscard]] static std::int64_t workspace_bytes(so::Reduction, so::BlockLayout, so::Dtype, int) {
    return 0;
  }
  void reduce_scatter(void*, so::BlockLayout, so::Dtype, so::Reduction, void*) { note("reduce_scatter"); }
  void all_gather(void*, so::BlockLayout, so::Dtype) { note("all_gather"); }
  void all_reduce(std::int64_t*, std::int64_t) { note("all_reduce"); }
  void broadcast(void*, std::int64_t, int) { note("broadcast"); }
  void exchange(std::span<const std::byte> mine, std::span<std::byte> all, void*) {
    note("exchange");
    std::copy(mine.begin(), mine.end(), all.begin());
  }

  void abort(std::string_view text) {
    if (state_->failed) return;
    state_->failed = true;
    state_->aborted = state_->may_abort;
    state_->told = text;
  }
  void throw_if_failed() const {
    if (state_->failed) throw so::CollectiveError("the link has failed");
  }
  [[nodiscard]] bool stuck() const noexcept { return state_->failed && !state_->aborted; }
  [[nodiscard]] std::function<void(const Device::Event&)> waiter() const {
    return [state = state_, device = device_](const Device::Event& event) {
      if (state->failed) throw so::CollectiveError("the link has failed");
      device.synchronize(event);
    };
  }

 private:
  void note(const char* what) {
    log_->note(what, own_stream.id, [] {});
  }

  std::shared_ptr<OrderLog> log_;
  std::shared_ptr<LinkState> state_;
  Device device_;
};
static_assert(so::Collective<OrderedLink<>>);

}  // namespace test
