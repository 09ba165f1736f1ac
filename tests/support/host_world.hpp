// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/solo.hpp>
#include <shardopt/collectives/threads.hpp>
#include <shardopt/devices/host.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>

/// Where a test runs: how ranks come to be, and how their memory is reached. The tests of other devices bring
/// models of the same two shapes (Memory, World) and reuse everything else.
namespace test {

namespace so = shardopt;

/// Host memory, as a device's is reached.
struct HostMemory {
  using Stream = so::Host::Stream;
  static constexpr std::size_t alignment = 256;

  [[nodiscard]] static std::byte* allocate(std::int64_t bytes) {
    return static_cast<std::byte*>(
        ::operator new (static_cast<std::size_t>(bytes), std::align_val_t{alignment}));
  }
  static void deallocate(std::byte* memory) { ::operator delete (memory, std::align_val_t{alignment}); }
  [[nodiscard]] static std::byte* allocate_pinned(std::int64_t bytes) { return allocate(bytes); }
  static void deallocate_pinned(std::byte* memory) { deallocate(memory); }

  /// Behind what `stream` holds; waits.
  static void upload(void* to, const void* from, std::int64_t bytes, Stream) {
    if (bytes > 0) std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
  static void download(void* to, const void* from, std::int64_t bytes, Stream) {
    if (bytes > 0) std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
};

/// Ranks as threads of this process.
struct ThreadsWorld {
  using Memory = HostMemory;
  using Comm = so::Threads<so::Host>;
  /// Whether the reduction leaves the gradients that a rank does not own as they were.
  static constexpr bool keeps_foreign_gradients = true;

  /// Calls body(comm, stream) once a rank, at the same time.
  template <class Body>
  static void run(int world, const Body& body) {
    Comm::run(world, [&](Comm comm) { body(std::move(comm), so::Host::Stream{}); });
  }
};

/// One rank without company.
struct SoloWorld {
  using Memory = HostMemory;
  using Comm = so::Solo<so::Host>;
  static constexpr bool keeps_foreign_gradients = true;

  template <class Body>
  static void run(int world, const Body& body) {
    if (world != 1) throw std::invalid_argument("a world of one rank");
    body(Comm{}, so::Host::Stream{});
  }
};

}  // namespace test
