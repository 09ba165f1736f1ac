// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/blocks.hpp>
#include <shardopt/collectives/collective.hpp>
#include <shardopt/collectives/thread_member.hpp>
#include <shardopt/collectives/threads.hpp>
#include <shardopt/devices/cuda.cuh>

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace shardopt::inline v0 {

/// Where one rank of Threads<Cuda> works.
struct ThreadSeat {
  int device = 0;                 ///< several ranks may share one
  cudaStream_t stream = nullptr;  ///< of that device, used by this rank alone; null: one of its own
};

/// Ranks are threads of this process, their GPUs the same one or peers: eight ranks on a single GPU, where
/// NCCL takes one.
///
/// Ranks read each other's memory; their streams are ordered by events. A call waits on the host until all
/// ranks have made it, but never for a device; it cannot be captured. Every call checks that all ranks make
/// the same call with the same arguments; when a rank throws, the others get a CollectiveError: nobody hangs.
/// Reductions are always `ordered`. Takes 1 KiB of device memory a rank that no MemoryPlan counts.
template <>
class Threads<Cuda> {
 public:
  /// Where buffers live and kernels run.
  using Device = Cuda;
  /// As it stands in messages.
  static constexpr std::string_view name = "threads";
  /// Calls meet on the host: a graph cannot hold that.
  static constexpr bool capturable = false;
  /// Ranks at most: their addresses are a kernel's arguments.
  static constexpr int most_ranks = detail::most_sources;

  /// One collective a rank, in rank order.
  /// @throws std::invalid_argument for no or too many seats, devices that do not exist, or such that cannot
  /// read each other's memory; CudaError
  [[nodiscard]] static std::vector<Threads> make(const std::vector<ThreadSeat>& seats,
                                                 std::chrono::milliseconds deadline = {}) {
    require_seats(seats);
    std::vector<Threads> result;
    std::size_t seat = 0;
    for (detail::ThreadMember& member :
         detail::ThreadMember::make(static_cast<int>(seats.size()), deadline)) {
      result.push_back(Threads(std::move(member), std::make_shared<Resources>(seats[seat++])));
    }
    return result;
  }

  /// Runs `body(Threads)` on one thread a seat, its device current, and joins them.
  /// @throws what the first rank that failed threw; what make() throws
  template <class Body>
  static void run(const std::vector<ThreadSeat>& seats, const Body& body,
                  std::chrono::milliseconds deadline = {}) {
    require_seats(seats);
    detail::ThreadMember::run(
        static_cast<int>(seats.size()),
        [&](detail::ThreadMember member) {
          const ThreadSeat seat = seats[static_cast<std::size_t>(member.rank())];
          Cuda::select(seat.device);
          body(Threads(std::move(member), std::make_shared<Resources>(seat)));
        },
        deadline);
  }

  /// Runs `world` ranks on the current device.
  template <class Body>
  static void run(int world, const Body& body, std::chrono::milliseconds deadline = {}) {
    const int device = Cuda::of(nullptr).ordinal();
    run(std::vector<ThreadSeat>(static_cast<std::size_t>((std::max)(world, 0)), ThreadSeat{device, nullptr}),
        body, deadline);
  }

  /// A view of the same rank, for an optimizer beside the engine's own use: calls of both must keep one
  /// order.
  [[nodiscard]] Threads borrow() const { return Threads(member_.borrow(), resources_); }

  /// This rank: 0 .. world - 1.
  [[nodiscard]] int rank() const noexcept { return member_.rank(); }
  /// Number of ranks.
  [[nodiscard]] int world() const noexcept { return member_.world(); }
  /// The stream on which every call is enqueued.
  [[nodiscard]] cudaStream_t stream() const noexcept { return resources_->stream; }
  /// The device of this rank.
  [[nodiscard]] const Cuda& device() const noexcept { return resources_->device; }

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

  /// Block `rank()` of `base` becomes the sum over the ranks. @see Collective
  void reduce_scatter(void* base, BlockLayout blocks, Dtype type, Reduction /*ordered*/,
                      void* /*workspace*/) {
    detail::require_block_a_rank(blocks, world(), name);
    const auto layout = detail::digest_of(blocks);
    meet({.operation = "reduce_scatter",
          .type = type,
          .count = blocks.elements(),
          .layout = layout,
          .data = base},
         [&](const std::vector<Posted>& ranks) {
           const Range own = blocks.block(rank());
           detail::Sources sources{};
           for (std::size_t source = 0; source < ranks.size(); ++source) {
             sources.addresses[source] = detail::element_of(ranks[source].data, own.begin, type);
           }
           device().sum_sources(type, sources, world(), detail::element_of(base, own.begin, type), own.size(),
                                stream());
         });
  }

  /// Block r of `base` becomes rank r's on every rank. @see Collective
  void all_gather(void* base, BlockLayout blocks, Dtype type) {
    detail::require_block_a_rank(blocks, world(), name);
    const auto layout = detail::digest_of(blocks);
    meet(
        {.operation = "all_gather", .type = type, .count = blocks.elements(), .layout = layout, .data = base},
        [&](const std::vector<Posted>& ranks) {
          for (int source = 0; source < world(); ++source) {
            const Range block = blocks.block(source);
            if (source == rank() || block.empty()) continue;
            device().copy(detail::element_of(base, block.begin, type),
                          detail::element_of(ranks[static_cast<std::size_t>(source)].data, block.begin, type),
                          detail::bytes_of(block.size(), type), stream());
          }
        });
  }

  /// Sums 64-bit integers over the ranks, modulo 2^64. @see Collective
  /// @throws std::invalid_argument for more than 128 values
  void all_reduce(std::int64_t* values, std::int64_t count) {
    if (count > scratch_words) {
      throw std::invalid_argument("shardopt: threads add at most " + std::to_string(scratch_words) +
                                  " integers at once, not " + std::to_string(count));
    }
    meet({.operation = "all_reduce", .type = Dtype::int64, .count = count, .data = values},
         [&](const std::vector<Posted>& ranks) {
           detail::Sources sources{};
           for (std::size_t source = 0; source < ranks.size(); ++source)
             sources.addresses[source] = ranks[source].data;
           device().sum_words(sources, world(), resources_->scratch, count, stream());
         });
    device().copy(values, resources_->scratch, count * static_cast<std::int64_t>(sizeof(std::int64_t)),
                  stream());
  }

  /// Rank `root`'s bytes replace the others'. @see Collective
  void broadcast(void* data, std::int64_t bytes, int root) {
    detail::require_rank(root, world(), name);
    meet({.operation = "broadcast", .count = bytes, .root = root, .data = data},
         [&](const std::vector<Posted>& ranks) {
           if (rank() != root)
             device().copy(data, ranks[static_cast<std::size_t>(root)].data, bytes, stream());
         });
  }

  /// Host bytes of every rank to every rank; waits. @see Collective
  void exchange(std::span<const std::byte> mine, std::span<std::byte> all, void* /*scratch*/) {
    member_.exchange(mine, all);
  }

 private:
  static constexpr std::int64_t scratch_words = 128;

  /// What a rank owns on its device; shared with what borrows the rank.
  struct Resources {
    explicit Resources(const ThreadSeat& seat)
        : device(seat.device), stream(seat.stream), owns_stream(seat.stream == nullptr) {
      const CudaDeviceGuard guard(seat.device);
      ready = device.make_event();
      done = device.make_event();
      scratch = static_cast<std::int64_t*>(
          device.allocate(scratch_words * static_cast<std::int64_t>(sizeof(std::int64_t))));
      if (!owns_stream) return;
      const cudaError_t status = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
      if (status != cudaSuccess) device.deallocate(scratch);
      throw_if_failed(status, "cudaStreamCreateWithFlags");
    }
    Resources(const Resources&) = delete;
    Resources& operator=(const Resources&) = delete;
    ~Resources() {
      device.finish(stream);
      device.deallocate(scratch);
      if (owns_stream) static_cast<void>(cudaStreamDestroy(stream));
    }

    Cuda device;
    cudaStream_t stream;
    bool owns_stream;
    Cuda::Event ready;  ///< behind what wrote this rank's buffer
    Cuda::Event done;   ///< behind this rank's reads of the others'
    std::int64_t* scratch = nullptr;
  };

  /// What the others need of a rank's request, kept while the rank may post the next one.
  struct Posted {
    void* data;
    std::shared_ptr<Resources>
        resources;  ///< the rank may be gone before the last wait for its event is enqueued
  };

  Threads(detail::ThreadMember member, std::shared_ptr<Resources> resources)
      : member_(std::move(member)), resources_(std::move(resources)) {}

  static void require_seats(const std::vector<ThreadSeat>& seats) {
    if (seats.empty() || seats.size() > static_cast<std::size_t>(most_ranks)) {
      throw std::invalid_argument("shardopt: Threads<Cuda> takes 1 to " + std::to_string(most_ranks) +
                                  " ranks, not " + std::to_string(seats.size()));
    }
    for (const ThreadSeat& seat : seats) detail::require_device(seat.device);
    for (const ThreadSeat& a : seats) {
      for (const ThreadSeat& b : seats) {
        if (a.device != b.device) enable_peer_access(a.device, b.device);
      }
    }
  }

  [[nodiscard]] static std::string cannot_read(int from, int to) {
    return "device " + std::to_string(from) + " cannot read the memory of device " + std::to_string(to) +
           "; Threads<Cuda> needs one device or peers, use Nccl";
  }

  static void enable_peer_access(int from, int to) {
    int possible = 0;
    throw_if_failed(cudaDeviceCanAccessPeer(&possible, from, to), "cudaDeviceCanAccessPeer");
    if (possible == 0) throw std::invalid_argument("shardopt: " + cannot_read(from, to));
    const CudaDeviceGuard guard(from);
    const cudaError_t status = cudaDeviceEnablePeerAccess(to, 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled) {
      static_cast<void>(cudaGetLastError());  // that it was enabled before is no failure to leave behind
      return;
    }
    try {
      throw_if_failed(status, "cudaDeviceEnablePeerAccess");
    } catch (CudaError& error) {
      error.add_context(cannot_read(from, to));
      throw;
    }
  }

  /// All ranks post; each one's stream waits until the others' buffers are written, works, and then waits
  /// until the others have read.
  template <class Work>
  void meet(detail::Rendezvous::Request request, const Work& work) {
    if (Cuda::capture_of(stream()) != 0) {
      throw std::logic_error(
          "shardopt: Threads<Cuda> meets on the host and cannot be captured; capture with Nccl");
    }
    request.source = &resources_;
    device().record(resources_->ready, stream());
    detail::Rendezvous& rendezvous = member_.rendezvous();
    rendezvous.post(rank(), request);
    std::vector<Posted> ranks;
    try {
      for (int source = 0; source < world(); ++source) {
        const auto& posted = rendezvous.of(source);
        ranks.push_back({posted.data, *static_cast<const std::shared_ptr<Resources>*>(posted.source)});
      }
      for (int source = 0; source < world(); ++source) {
        if (source != rank()) device().wait(stream(), resources_of(ranks, source).ready);
      }
      work(ranks);
      device().record(resources_->done, stream());
    } catch (...) {
      device().finish(stream());  // no event says when its reads of the others' memory end
      rendezvous.done();          // others still read what this rank posted
      finish_reads(ranks);
      throw;
    }
    rendezvous.done();
    try {
      for (int source = 0; source < world(); ++source) {
        if (source != rank()) device().wait(stream(), resources_of(ranks, source).done);
      }
    } catch (...) {
      finish_reads(ranks);
      throw;
    }
  }

  [[nodiscard]] static const Resources& resources_of(const std::vector<Posted>& ranks, int rank) noexcept {
    return *ranks[static_cast<std::size_t>(rank)].resources;
  }

  /// Waits on the host until the other ranks have read this one's memory: a rank that has failed may free it.
  void finish_reads(const std::vector<Posted>& ranks) const noexcept {
    for (const Posted& posted : ranks) {
      if (posted.resources != resources_) device().finish(posted.resources->done);
    }
  }

  detail::ThreadMember member_;
  std::shared_ptr<Resources> resources_;
};

static_assert(Collective<Threads<Cuda>>);

}  // namespace shardopt::inline v0
