// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/process_place.hpp>
#include <shardopt/core/error.hpp>
#include <shardopt/core/random_bits.hpp>

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace shardopt::inline v0 {
namespace detail {

using BootstrapClock = std::chrono::steady_clock;

/// A socket that closes itself. Every wait ends at a time that the caller gives.
class Socket {
 public:
  explicit Socket(int descriptor = -1) noexcept : descriptor_(descriptor) {}
  Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  ~Socket() {
    if (descriptor_ >= 0) static_cast<void>(::close(descriptor_));
  }

  [[nodiscard]] int get() const noexcept { return descriptor_; }
  [[nodiscard]] bool valid() const noexcept { return descriptor_ >= 0; }

  /// Whether the socket is ready before `end`.
  [[nodiscard]] bool wait(short events, BootstrapClock::time_point end) const noexcept {
    for (;;) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(end - BootstrapClock::now()).count();
      if (left <= 0) return false;
      pollfd entry{descriptor_, events, 0};
      const int ready = ::poll(&entry, 1, static_cast<int>((std::min)(left, decltype(left){1 << 30})));
      if (ready > 0) return true;
      if (ready < 0 && errno != EINTR) return false;  // a signal ends no wait
    }
  }

  /// Whether the socket, which does not block, is connected before `end`.
  [[nodiscard]] bool connect(const sockaddr* address, socklen_t size,
                             BootstrapClock::time_point end) const noexcept {
    if (::connect(descriptor_, address, size) == 0) return true;
    if (errno != EINPROGRESS && errno != EINTR) return false;
    int error = 0;
    socklen_t error_size = sizeof error;
    return wait(POLLOUT, end) && ::getsockopt(descriptor_, SOL_SOCKET, SO_ERROR, &error, &error_size) == 0 &&
           error == 0;
  }

  [[nodiscard]] bool send_all(std::span<const std::byte> bytes,
                              BootstrapClock::time_point end) const noexcept {
    while (!bytes.empty()) {
      if (!wait(POLLOUT, end)) return false;
      const ssize_t sent = ::send(descriptor_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent < 0 && would_block()) continue;
      if (sent <= 0) return false;
      bytes = bytes.subspan(static_cast<std::size_t>(sent));
    }
    return true;
  }

  [[nodiscard]] bool receive_all(std::span<std::byte> bytes, BootstrapClock::time_point end) const noexcept {
    while (!bytes.empty()) {
      if (!wait(POLLIN, end)) return false;
      const ssize_t got = ::recv(descriptor_, bytes.data(), bytes.size(), 0);
      if (got < 0 && would_block()) continue;
      if (got <= 0) return false;
      bytes = bytes.subspan(static_cast<std::size_t>(got));
    }
    return true;
  }

 private:
  /// Whether the last call has failed only because nothing could be done at once.
  [[nodiscard]] static bool would_block() noexcept {
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
  }

  int descriptor_;
};

/// What a rank says first: tells strangers and other jobs apart.
struct Greeting {
  std::uint64_t magic = 0x73686172646f7074U;
  std::uint64_t job = 0;
  std::int32_t world = 0;
  std::int32_t rank = 0;
  std::uint64_t caller = 0;  ///< a rank that was served and comes again wants the next call
  std::uint64_t bytes = 0;
};

/// What rank 0 says before the bytes: tells it from strangers, too.
struct Answer {
  std::uint64_t magic = 0x7061727473686172U;
  std::uint64_t job = 0;
  std::uint64_t bytes = 0;
};

/// A number of this thread's own, over all processes.
[[nodiscard]] inline std::uint64_t caller_id() {
  static thread_local const std::uint64_t id = random_bits();
  return id;
}

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

/// @throws Error naming what cannot be resolved
[[nodiscard]] inline Addresses resolve(const char* host, int port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int status = ::getaddrinfo(host, std::to_string(port).c_str(), &hints, &found);
  if (status != 0) {
    throw Error(std::string("shardopt: the address ") + (host != nullptr ? host : "*") +
                " cannot be resolved: " + ::gai_strerror(status));
  }
  return {found, &::freeaddrinfo};
}

[[nodiscard]] inline Socket listen_at(int port) {
  std::string reason = "no address";
  const Addresses addresses = resolve(nullptr, port, AI_PASSIVE);
  for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
    Socket socket(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol));
    const int yes = 1;
    const int no = 0;
    if (!socket.valid()) continue;
    static_cast<void>(::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes));
    if (a->ai_family == AF_INET6)
      static_cast<void>(::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no));
    if (::bind(socket.get(), a->ai_addr, a->ai_addrlen) == 0 && ::listen(socket.get(), 1024) == 0)
      return socket;
    reason = std::strerror(errno);
  }
  throw Error("shardopt: rank 0 cannot listen at port " + std::to_string(port) + ": " + reason);
}

/// Rank 0: gives the bytes to every other rank.
inline void hand_out(const ProcessPlace& place, std::uint64_t job, std::span<const std::byte> bytes,
                     BootstrapClock::time_point end) {
  const Socket listener = listen_at(place.port);
  std::vector<std::optional<std::uint64_t>> served(static_cast<std::size_t>(place.world));  // callers
  served[0] = caller_id();
  while (std::find(served.begin(), served.end(), std::nullopt) != served.end()) {
    if (!listener.wait(POLLIN, end)) {
      std::string missing;
      for (std::size_t rank = 0; rank < served.size(); ++rank) {
        if (!served[rank]) missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
      }
      throw CollectiveError("shardopt: rank 0 waits at port " + std::to_string(place.port) +
                            " in vain for rank " + missing);
    }
    const Socket peer(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    Greeting greeting{};
    // A stranger must not hold up the others: it has a second to say who it is.
    const auto soon = (std::min)(end, BootstrapClock::now() + std::chrono::seconds(1));
    if (!peer.valid() || !peer.receive_all(std::as_writable_bytes(std::span(&greeting, 1)), soon)) continue;
    if (greeting.magic != Greeting{}.magic || greeting.job != job) continue;
    if (greeting.world != place.world || greeting.rank < 1 || greeting.rank >= place.world) {
      throw CollectiveError("shardopt: rank 0 knows of " + std::to_string(place.world) + " ranks, but rank " +
                            std::to_string(greeting.rank) + " of " + std::to_string(greeting.world) +
                            " has come");
    }
    if (greeting.bytes != bytes.size()) {
      throw CollectiveError("shardopt: rank 0 shares " + std::to_string(bytes.size()) + " bytes, rank " +
                            std::to_string(greeting.rank) + " asks for " + std::to_string(greeting.bytes));
    }
    std::optional<std::uint64_t>& caller = served[static_cast<std::size_t>(greeting.rank)];
    if (caller == greeting.caller) continue;  // it tries again until the next call
    if (caller) {
      throw CollectiveError("shardopt: two processes call themselves rank " + std::to_string(greeting.rank));
    }
    const Answer answer{.job = job, .bytes = bytes.size()};
    if (peer.send_all(std::as_bytes(std::span(&answer, 1)), end) && peer.send_all(bytes, end))
      caller = greeting.caller;
  }
}

/// One attempt of another rank.
[[nodiscard]] inline bool fetch_once(const ProcessPlace& place, std::uint64_t job, std::span<std::byte> bytes,
                                     BootstrapClock::time_point end) {
  const Addresses addresses = resolve(place.address.c_str(), place.port, 0);
  for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
    const Socket socket(
        ::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol));
    if (!socket.valid() || !socket.connect(a->ai_addr, a->ai_addrlen, end)) continue;
    const Greeting greeting{
        .job = job, .world = place.world, .rank = place.rank, .caller = caller_id(), .bytes = bytes.size()};
    Answer answer{.magic = 0};
    if (!socket.send_all(std::as_bytes(std::span(&greeting, 1)), end) ||
        !socket.receive_all(std::as_writable_bytes(std::span(&answer, 1)), end))
      continue;
    const bool known = answer.magic == Answer{}.magic && answer.job == job && answer.bytes == bytes.size();
    if (known && socket.receive_all(bytes, end)) return true;
  }
  return false;
}

}  // namespace detail

/// Gives rank 0's bytes (the id of a communicator) to all ranks, by TCP at `place.address`:`place.port`.
/// Collective. A rank makes its calls on one thread.
/// @param job  tells runs apart that might meet at one port
/// @throws std::invalid_argument for a place that cannot be, or without an address; CollectiveError if not
/// all ranks have come before the deadline, or ranks disagree; Error if the address or port does not work
inline void share_from_rank_0(const ProcessPlace& place, std::span<std::byte> bytes,
                              std::chrono::milliseconds deadline, std::uint64_t job = 0) {
  if (place.world < 1 || place.rank < 0 || place.rank >= place.world || place.port < 1 ||
      place.port > 65535) {
    throw std::invalid_argument("shardopt: there is no rank " + std::to_string(place.rank) + " of " +
                                std::to_string(place.world) + " at port " + std::to_string(place.port));
  }
  deadline = (std::max)(deadline, std::chrono::milliseconds(0));
  // A hundred years: what is longer cannot be added to a time point.
  const auto end = detail::BootstrapClock::now() +
                   (std::min<std::chrono::milliseconds>)(deadline, std::chrono::hours(876000));
  if (place.world == 1) return;
  if (place.rank == 0) return detail::hand_out(place, job, bytes, end);
  if (place.address.empty()) {
    throw std::invalid_argument("shardopt: rank " + std::to_string(place.rank) +
                                " does not know where rank 0 is: set MASTER_ADDR");
  }
  while (!detail::fetch_once(place, job, bytes, end)) {
    if (detail::BootstrapClock::now() >= end) {
      throw CollectiveError("shardopt: rank " + std::to_string(place.rank) + " has not reached rank 0 at " +
                            place.address + ":" + std::to_string(place.port) + " within " +
                            std::to_string(deadline.count()) + " ms");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

/// The same for an object.
template <class Object>
void share_from_rank_0(const ProcessPlace& place, Object& object, std::chrono::milliseconds deadline,
                       std::uint64_t job = 0) {
  static_assert(std::is_trivially_copyable_v<Object>);
  share_from_rank_0(place, std::as_writable_bytes(std::span(&object, 1)), deadline, job);
}

}  // namespace shardopt::inline v0
