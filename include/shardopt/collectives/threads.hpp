// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/collective.hpp>
#include <shardopt/collectives/rendezvous.hpp>
#include <shardopt/core/digest.hpp>
#include <shardopt/core/error.hpp>
#include <shardopt/devices/host.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace shardopt::inline v0 {

template <class DeviceType>
class Threads;

/// Ranks are threads of this process and read each other's memory.
///
/// Every call checks that all ranks make the same call with the same arguments. When a rank throws, the
/// others get a CollectiveError with its message from the call they are in: nobody hangs. Reductions are
/// always `ordered`.
template <>
class Threads<Host> {
 public:
  /// Where buffers live and kernels run.
  using Device = Host;
  /// As it stands in messages.
  static constexpr std::string_view name = "threads";

  /// One collective a rank, in rank order. @throws std::invalid_argument unless world > 0
  [[nodiscard]] static std::vector<Threads> make(int world) {
    require_world(world);
    const auto shared = std::make_shared<detail::Rendezvous>(world);
    std::vector<Threads> result;
    for (int rank = 0; rank < world; ++rank) result.push_back(Threads(shared, rank, true));
    return result;
  }

  /// Runs `body(Threads)` on `world` threads, one a rank, and joins them.
  /// @throws what the first rank that failed threw
  template <class Body>
  static void run(int world, const Body& body) {
    require_world(world);
    const auto shared = std::make_shared<detail::Rendezvous>(world);
    std::mutex mutex;
    std::exception_ptr first;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          body(Threads(shared, rank, false));
          shared->leave(rank);
        } catch (const std::exception& error) {
          keep_first(mutex, first);
          shared->abort("rank " + std::to_string(rank) + " failed: " + error.what());
        } catch (...) {
          keep_first(mutex, first);
          shared->abort("rank " + std::to_string(rank) + " failed");
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    if (first) std::rethrow_exception(first);
  }

  /// Moves; what is moved from is no rank any more.
  Threads(Threads&& other) noexcept
      : shared_(std::move(other.shared_)), rank_(other.rank_), owns_(std::exchange(other.owns_, false)) {}
  /// Exchanges the two.
  Threads& operator=(Threads&& other) noexcept {
    std::swap(shared_, other.shared_);
    std::swap(rank_, other.rank_);
    std::swap(owns_, other.owns_);
    return *this;
  }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;
  ~Threads() {
    if (owns_ && shared_) shared_->leave(rank_);
  }

  /// A view of the same rank, for an optimizer beside the engine's own use: calls of both must keep one
  /// order.
  [[nodiscard]] Threads borrow() const { return Threads(shared_, rank_, false); }

  /// This rank: 0 .. world - 1.
  [[nodiscard]] int rank() const noexcept { return rank_; }
  /// Number of ranks.
  [[nodiscard]] int world() const noexcept { return shared_->world(); }
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
  void abort(std::string_view message) {
    shared_->abort("rank " + std::to_string(rank_) + " failed: " + std::string(message));
  }

  /// Waits for all ranks.
  void barrier() { shared_->post(rank_, {.operation = "barrier"}); }

  /// Block `rank()` of `base` becomes the sum over the ranks. @see Collective
  void reduce_scatter(void* base, BlockLayout blocks, Dtype type, Reduction /*ordered*/,
                      void* /*workspace*/) {
    meet({.operation = "reduce_scatter",
          .type = type,
          .count = blocks.elements(),
          .layout = digest_of(blocks),
          .data = base},
         [&] {
           const Range own = blocks.block(rank_);
           std::vector<void*> sources;
           for (int rank = 0; rank < world(); ++rank) {
             sources.push_back(static_cast<std::byte*>(shared_->of(rank).data) + own.begin * bytes_of(type));
           }
           Host::sum_ranks(type, sources, sources[static_cast<std::size_t>(rank_)], own.size());
         });
  }

  /// Block r of `base` becomes rank r's on every rank. @see Collective
  void all_gather(void* base, BlockLayout blocks, Dtype type) {
    meet({.operation = "all_gather",
          .type = type,
          .count = blocks.elements(),
          .layout = digest_of(blocks),
          .data = base},
         [&] {
           for (int rank = 0; rank < world(); ++rank) {
             const Range block = blocks.block(rank);
             if (rank == rank_ || block.empty()) continue;
             const std::int64_t begin = block.begin * bytes_of(type);
             std::memcpy(static_cast<std::byte*>(base) + begin,
                         static_cast<const std::byte*>(shared_->of(rank).data) + begin,
                         static_cast<std::size_t>(block.size() * bytes_of(type)));
           }
         });
  }

  /// Sums 64-bit integers over the ranks, modulo 2^64. @see Collective
  void all_reduce(std::int64_t* values, std::int64_t count) {
    std::vector<std::uint64_t> sums(static_cast<std::size_t>(count), 0);
    meet({.operation = "all_reduce", .type = Dtype::int64, .count = count, .data = values}, [&] {
      for (int rank = 0; rank < world(); ++rank) {
        const auto* theirs = static_cast<const std::int64_t*>(shared_->of(rank).data);
        for (std::size_t k = 0; k < sums.size(); ++k) sums[k] += static_cast<std::uint64_t>(theirs[k]);
      }
    });
    for (std::size_t k = 0; k < sums.size(); ++k) values[k] = static_cast<std::int64_t>(sums[k]);
  }

  /// Rank `root`'s bytes replace the others'. @see Collective
  void broadcast(void* data, std::int64_t bytes, int root) {
    meet({.operation = "broadcast", .count = bytes, .root = root, .data = data}, [&] {
      if (rank_ != root && bytes > 0)
        std::memcpy(data, shared_->of(root).data, static_cast<std::size_t>(bytes));
    });
  }

  /// Host bytes of every rank to every rank; waits. @see Collective
  void exchange(std::span<const std::byte> mine, std::span<std::byte> all, void* /*scratch*/) {
    meet({.operation = "exchange", .count = static_cast<std::int64_t>(mine.size()), .source = mine.data()},
         [&] {
           for (int rank = 0; rank < world() && !mine.empty(); ++rank) {
             std::memcpy(all.data() + static_cast<std::size_t>(rank) * mine.size(), shared_->of(rank).source,
                         mine.size());
           }
         });
  }

 private:
  Threads(std::shared_ptr<detail::Rendezvous> shared, int rank, bool owns)
      : shared_(std::move(shared)), rank_(rank), owns_(owns) {}

  static void require_world(int world) {
    if (world < 1)
      throw std::invalid_argument("shardopt: a world needs at least one rank, got " + std::to_string(world));
  }

  static void keep_first(std::mutex& mutex, std::exception_ptr& first) {
    const std::lock_guard lock(mutex);
    if (!first) first = std::current_exception();
  }

  [[nodiscard]] static std::int64_t bytes_of(Dtype type) noexcept {
    return static_cast<std::int64_t>(size_of(type));
  }

  [[nodiscard]] static std::uint64_t digest_of(BlockLayout blocks) noexcept {
    Digest digest;
    for (const std::int64_t border : blocks.borders) digest.add(static_cast<std::uint64_t>(border));
    return digest.value();
  }

  template <class Work>
  void meet(const detail::Rendezvous::Request& request, const Work& work) {
    shared_->post(rank_, request);
    work();
    shared_->done(rank_, request.operation);
  }

  std::shared_ptr<detail::Rendezvous> shared_;
  int rank_;
  bool owns_;
};

static_assert(Collective<Threads<Host>>);

}  // namespace shardopt::inline v0
