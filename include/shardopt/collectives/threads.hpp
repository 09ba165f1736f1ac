// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/blocks.hpp>
#include <shardopt/collectives/collective.hpp>
#include <shardopt/collectives/thread_member.hpp>
#include <shardopt/devices/host.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace shardopt::inline v0 {

/// Ranks are threads of one process; `Threads<Host>` here, `Threads<Cuda>` in threads.cuh.
template <class DeviceType>
class Threads;

/// Ranks are threads of this process and read each other's memory.
///
/// Every call checks that all ranks make the same call with the same arguments. When a rank throws, the
/// others get a CollectiveError with its message from the call they are in: nobody hangs. A call whose data
/// is being copied ends only when all have copied it: deadlines count until the last rank has come.
/// Reductions are always `ordered`.
template <>
class Threads<Host> {
 public:
  /// Where buffers live and kernels run.
  using Device = Host;
  /// As it stands in messages.
  static constexpr std::string_view name = "threads";

  /// One collective a rank, in rank order.
  /// @param deadline  ranks that wait longer for another get an error that says who waits where; 0: no limit
  /// @throws std::invalid_argument unless world > 0 and deadline >= 0
  [[nodiscard]] static std::vector<Threads> make(int world, std::chrono::milliseconds deadline = {}) {
    std::vector<Threads> result;
    for (detail::ThreadMember& member : detail::ThreadMember::make(world, deadline))
      result.push_back(Threads(std::move(member)));
    return result;
  }

  /// Runs `body(Threads)` on `world` threads, one a rank, and joins them.
  /// @throws what the first rank that failed threw; std::system_error if the system gives no thread;
  /// std::invalid_argument as make() does
  template <class Body>
  static void run(int world, const Body& body, std::chrono::milliseconds deadline = {}) {
    detail::ThreadMember::run(
        world, [&](detail::ThreadMember member) { body(Threads(std::move(member))); }, deadline);
  }

  /// A view of the same rank, for an optimizer beside the engine's own use: calls of both must keep one
  /// order.
  [[nodiscard]] Threads borrow() const { return Threads(member_.borrow()); }

  /// This rank: 0 .. world - 1.
  [[nodiscard]] int rank() const noexcept { return member_.rank(); }
  /// Number of ranks.
  [[nodiscard]] int world() const noexcept { return member_.world(); }
  /// The stream on which every call is enqueued.
  [[nodiscard]] Host::Stream stream() const noexcept { return {}; }
  /// The device of this rank.
  [[nodiscard]] Host device() const noexcept { return {}; }

  /// Whether gradients of that type can be reduced so.
  [[nodiscard]] static bool supports(Reduction reduction, Dtype) noexcept {
    return reduction != Reduction::native;
  }
  /// What Reduction::automatic stands for.
  [[nodiscard]] static Reduction automatic_reduction(Dtype) noexcept { return Reduction::ordered; }
  /// Bytes that reduce_scatter needs beside its buffer.
  [[nodiscard]] static std::int64_t workspace_bytes(Reduction, BlockLayout, Dtype, int /*rank*/) noexcept {
    return 0;
  }

  /// Tells all ranks that this one has failed; for engines that run their own threads.
  void abort(std::string_view message) { member_.abort(message); }

  /// Waits for all ranks.
  void barrier() { member_.rendezvous().wait(rank(), {.operation = "barrier"}); }

  /// Block `rank()` of `base` becomes the sum over the ranks. @see Collective
  void reduce_scatter(void* base, BlockLayout blocks, Dtype type, Reduction /*ordered*/,
                      void* /*workspace*/) {
    detail::require_block_a_rank(blocks, world(), name);
    const auto layout = detail::digest_of(blocks);
    member_.meet({.operation = "reduce_scatter",
                  .type = type,
                  .count = blocks.elements(),
                  .layout = layout,
                  .data = base},
                 [&] {
                   const Range own = blocks.block(rank());
                   std::vector<void*> sources;
                   for (int source = 0; source < world(); ++source) {
                     sources.push_back(detail::element_of(posted(source).data, own.begin, type));
                   }
                   Host::sum_ranks(type, sources, sources[static_cast<std::size_t>(rank())], own.size());
                 });
  }

  /// Block r of `base` becomes rank r's on every rank. @see Collective
  void all_gather(void* base, BlockLayout blocks, Dtype type) {
    detail::require_block_a_rank(blocks, world(), name);
    const auto layout = detail::digest_of(blocks);
    member_.meet(
        {.operation = "all_gather", .type = type, .count = blocks.elements(), .layout = layout, .data = base},
        [&] {
          for (int source = 0; source < world(); ++source) {
            const Range block = blocks.block(source);
            if (source == rank() || block.empty()) continue;
            std::memcpy(detail::element_of(base, block.begin, type),
                        detail::element_of(posted(source).data, block.begin, type),
                        static_cast<std::size_t>(detail::bytes_of(block.size(), type)));
          }
        });
  }

  /// Sums 64-bit integers over the ranks, modulo 2^64. @see Collective
  void all_reduce(std::int64_t* values, std::int64_t count) {
    std::vector<std::uint64_t> sums(static_cast<std::size_t>(count), 0);
    member_.meet({.operation = "all_reduce", .type = Dtype::int64, .count = count, .data = values}, [&] {
      for (int source = 0; source < world(); ++source) {
        const auto* theirs = static_cast<const std::int64_t*>(posted(source).data);
        for (std::size_t k = 0; k < sums.size(); ++k) sums[k] += static_cast<std::uint64_t>(theirs[k]);
      }
    });
    for (std::size_t k = 0; k < sums.size(); ++k) values[k] = static_cast<std::int64_t>(sums[k]);
  }

  /// Rank `root`'s bytes replace the others'. @see Collective
  void broadcast(void* data, std::int64_t bytes, int root) {
    detail::require_rank(root, world(), name);
    member_.meet({.operation = "broadcast", .count = bytes, .root = root, .data = data}, [&] {
      if (rank() != root && bytes > 0) std::memcpy(data, posted(root).data, static_cast<std::size_t>(bytes));
    });
  }

  /// Host bytes of every rank to every rank; waits. @see Collective
  void exchange(std::span<const std::byte> mine, std::span<std::byte> all, void* /*scratch*/) {
    member_.exchange(mine, all);
  }

 private:
  explicit Threads(detail::ThreadMember member) : member_(std::move(member)) {}

  [[nodiscard]] const detail::Rendezvous::Request& posted(int source) const noexcept {
    return member_.rendezvous().of(source);
  }

  detail::ThreadMember member_;
};

static_assert(Collective<Threads<Host>>);

}  // namespace shardopt::inline v0
