// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/blocks.hpp>
#include <shardopt/collectives/call_signature.hpp>
#include <shardopt/collectives/collective.hpp>
#include <shardopt/collectives/nccl_error.cuh>
#include <shardopt/collectives/nccl_handle.cuh>
#include <shardopt/collectives/nccl_options.hpp>
#include <shardopt/core/dtype.hpp>
#include <shardopt/core/error.hpp>
#include <shardopt/core/range.hpp>
#include <shardopt/devices/cuda.cuh>
#include <shardopt/devices/cuda_choice.cuh>

#include <cuda_runtime.h>
#include <nccl.h>

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace shardopt::inline v0 {

/// Ranks are GPUs that talk by NCCL, one a GPU, in one process or many.
///
/// NCCL is called only inside the library's own calls, on the stream given here, in program order: the engine
/// may use the same communicator between them (within a step, see ZeroOptimizer::gradient_ready). Equal
/// blocks are sent by reduce-scatter and all-gather in place, others by one group of reductions or
/// broadcasts. `ordered` reductions send each slice to its owner (the same bytes) and add there.
///
/// Each call throws NcclError or CudaError where one of theirs fails, CollectiveError where the communicator
/// has failed, and std::invalid_argument for blocks or a root that do not fit the world; nothing was sent
/// then.
class Nccl {
 public:
  /// Where buffers live and kernels run.
  using Device = Cuda;
  /// As it stands in messages.
  static constexpr std::string_view name = "nccl";

  /// The engine's communicator, used on the engine's stream; both must outlive this. The communicator's
  /// device may differ from the current one. May be borrowed several times, with options of each user's own;
  /// an abort by one is a failure for all.
  /// @throws NcclError if the communicator is not usable; std::system_error if no thread can watch it
  [[nodiscard]] static Nccl borrow(ncclComm_t comm, cudaStream_t stream, const NcclOptions& options = {}) {
    return Nccl(comm, stream, false, options);
  }

  /// A communicator of its own on the current device. Collective; waits for the other ranks, at most for
  /// `options.deadline` if there is one; with one, the communicator does not block (see native()). Destroy
  /// graphs that captured its steps before this goes: NCCL waits for them.
  /// @param id  the same on all ranks, from ncclGetUniqueId on one of them
  /// @throws std::invalid_argument for a rank outside the world; NcclError, or with a deadline
  /// CollectiveError, if the ranks cannot join: two use one GPU, or not all have come in time;
  /// std::system_error if no thread can watch it
  [[nodiscard]] static Nccl create(const ncclUniqueId& id, int rank, int world, cudaStream_t stream,
                                   const NcclOptions& options = {}) {
    detail::require_rank(rank, world, name);
    ncclComm_t comm = nullptr;
    if (options.deadline.count() > 0) {
      comm = join_in_time(id, rank, world, options.deadline);
    } else {
      try {
        shardopt::throw_if_failed(ncclCommInitRank(&comm, world, id, rank), "ncclCommInitRank");
      } catch (NcclError& error) {
        error.add_context(attempt(rank, world) + " cannot join" + advice(error.what()));
        throw;
      }
    }
    return Nccl(comm, stream, true, options);
  }

  Nccl(Nccl&&) noexcept = default;  ///< what is moved from is no rank any more
  /// Exchanges the two.
  Nccl& operator=(Nccl&& other) noexcept {
    std::swap(stream_, other.stream_);
    std::swap(rank_, other.rank_);
    std::swap(world_, other.world_);
    std::swap(device_, other.device_);
    std::swap(handle_, other.handle_);
    std::swap(signatures_, other.signatures_);
    return *this;
  }
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;
  /// Ends the use of the communicator, whoever still waits with waiter(); destroys it if it is the library's.
  ~Nccl() {
    signatures_.reset();
    if (handle_) handle_->close();
  }

  /// Gives the communicator up: what waits for a peer ends, every later call throws. From any thread; again
  /// has no effect. Aborts a borrowed communicator only if NcclOptions::abort_borrowed says so.
  void abort(std::string_view reason) noexcept {
    if (handle_) handle_->fail("aborted: ", reason);
  }

  /// @throws CollectiveError if the communicator has failed or was aborted
  void throw_if_failed() const { handle_->throw_if_failed(); }

  /// Whether work may wait for a lost peer for ever: the communicator has failed and may not be aborted.
  [[nodiscard]] bool stuck() const noexcept { return handle_ && handle_->stuck(); }

  /// What the next calls belong to, for reports of failures.
  template <class Text>
  requires std::convertible_to<const Text&, std::string>
  void label(const Text& text) {
    if (handle_->watched()) handle_->label(text);
  }

  /// Waits for events on the host, and throws if the communicator fails meanwhile: at once where there is a
  /// deadline, else when the event comes. May outlive this and the communicator; then it only waits.
  [[nodiscard]] std::function<void(const Cuda::Event&)> waiter() const {
    return [handle = handle_](const Cuda::Event& event) { handle->wait(event); };
  }

  /// For debugging: from now on every call but exchange() first compares operation, type, count, root and
  /// blocks with the other ranks', and waits for that. Where they differ every rank gets a CollectiveError
  /// that names both, instead of a hang or wrong sums. All ranks must ask for it, or they hang; as calls wait
  /// on the host, they cannot be captured. Costs a small all-gather and a wait a call, and world · 64 bytes
  /// of device memory that no MemoryPlan counts.
  /// @throws CudaError
  [[nodiscard]] Nccl verifying_calls() && {
    if (signatures_ == nullptr) {
      signatures_ = {device_.allocate(world_ * static_cast<std::int64_t>(sizeof(detail::CallSignature))),
                     [device = device_, handle = handle_](void* memory) {
                       // To free it would wait for the device, for ever where a kernel waits for a lost peer.
                       if (!handle->stuck()) device.deallocate(memory);
                     }};
    }
    return std::move(*this);
  }

  /// This rank: 0 .. world - 1.
  [[nodiscard]] int rank() const noexcept { return rank_; }
  /// Number of ranks.
  [[nodiscard]] int world() const noexcept { return world_; }
  /// The stream on which every call is enqueued.
  [[nodiscard]] cudaStream_t stream() const noexcept { return stream_; }
  /// The device of this rank.
  [[nodiscard]] const Cuda& device() const noexcept { return device_; }
  /// The communicator itself; null once it was aborted. One that create() made with a deadline does not
  /// block: the engine's own calls with it may return ncclInProgress, and are then to be waited for by
  /// ncclCommGetAsyncError.
  [[nodiscard]] ncclComm_t native() const noexcept { return handle_->native(); }

  /// Whether gradients of that type can be reduced so.
  [[nodiscard]] static bool supports(Reduction reduction, Dtype type) noexcept {
    return reduction != Reduction::ordered || type == Dtype::fp32 || type == Dtype::bf16 ||
           type == Dtype::fp16;
  }
  /// 16-bit gradients are summed in fp32, in order; fp32 ones by NCCL.
  [[nodiscard]] static Reduction automatic_reduction(Dtype type) noexcept {
    return type == Dtype::fp32 ? Reduction::native : Reduction::ordered;
  }
  /// Ordered: what the other ranks send of the own block.
  [[nodiscard]] static std::int64_t workspace_bytes(Reduction reduction, BlockLayout blocks, Dtype type,
                                                    int rank) noexcept {
    if (reduction != Reduction::ordered) return 0;
    return (blocks.world() - 1) * blocks.block(rank).size() * static_cast<std::int64_t>(size_of(type));
  }

  /// Block `rank()` of `base` becomes the sum over the ranks. @see Collective
  /// @throws std::invalid_argument for a reduction that is automatic or not supported; nothing was sent
  void reduce_scatter(void* base, BlockLayout blocks, Dtype type, Reduction reduction, void* workspace) {
    detail::require_block_a_rank(blocks, world_, name);
    verify({.operation = detail::Operation::reduce_scatter,
            .type = type,
            .count = blocks.elements(),
            .layout = detail::digest_of(blocks) + static_cast<std::uint64_t>(reduction)});
    // Refused behind the comparison: ranks that call for another reduction wait in it.
    if (reduction == Reduction::automatic || !supports(reduction, type)) {
      throw std::invalid_argument("shardopt: nccl has no " + std::string(name_of(reduction)) +
                                  " reduction of " + std::string(name_of(type)));
    }
    if (reduction == Reduction::ordered && world_ > most_ordered_ranks) {
      throw std::invalid_argument("shardopt: nccl has no ordered reduction of more than " +
                                  std::to_string(most_ordered_ranks) + " ranks, such as " +
                                  std::to_string(world_));
    }
    if (blocks.elements() == 0) return;
    if (reduction == Reduction::ordered) return reduce_scatter_ordered(base, blocks, type, workspace);
    if (blocks.uniform()) {
      const Range own = blocks.block(rank_);
      enqueue("ncclReduceScatter", [&](ncclComm_t comm) {
        return ncclReduceScatter(base, detail::element_of(base, own.begin, type), size(own), nccl_type(type),
                                 ncclSum, comm, stream_);
      });
      return;
    }
    enqueue_blocks("ncclReduce", base, blocks, type,
                   [&](void* data, std::size_t count, int root, ncclComm_t comm) {
                     return ncclReduce(data, root == rank_ ? data : nullptr, count, nccl_type(type), ncclSum,
                                       root, comm, stream_);
                   });
  }

  /// Block r of `base` becomes rank r's. @see Collective
  void all_gather(void* base, BlockLayout blocks, Dtype type) {
    detail::require_block_a_rank(blocks, world_, name);
    verify({.operation = detail::Operation::all_gather,
            .type = type,
            .count = blocks.elements(),
            .layout = detail::digest_of(blocks)});
    if (blocks.elements() == 0) return;
    if (blocks.uniform()) {
      const Range own = blocks.block(rank_);
      enqueue("ncclAllGather", [&](ncclComm_t comm) {
        return ncclAllGather(detail::element_of(base, own.begin, type), base, size(own), nccl_type(type),
                             comm, stream_);
      });
      return;
    }
    enqueue_blocks("ncclBroadcast", base, blocks, type,
                   [&](void* data, std::size_t count, int root, ncclComm_t comm) {
                     return ncclBroadcast(data, data, count, nccl_type(type), root, comm, stream_);
                   });
  }

  /// Sums over the ranks, in place. @see Collective
  void all_reduce(std::int64_t* values, std::int64_t count) {
    verify({.operation = detail::Operation::all_reduce, .type = Dtype::int64, .count = count});
    if (count == 0) return;
    enqueue("ncclAllReduce", [&](ncclComm_t comm) {
      return ncclAllReduce(values, values, static_cast<std::size_t>(count), ncclInt64, ncclSum, comm,
                           stream_);
    });
  }

  /// Bytes of one rank to all. @see Collective
  void broadcast(void* data, std::int64_t bytes, int root) {
    detail::require_rank(root, world_, name);
    verify({.operation = detail::Operation::broadcast, .type = Dtype::uint8, .count = bytes, .root = root});
    if (bytes == 0) return;
    enqueue("ncclBroadcast", [&](ncclComm_t comm) {
      return ncclBroadcast(data, data, static_cast<std::size_t>(bytes), ncclUint8, root, comm, stream_);
    });
  }

  /// Host bytes of every rank to every rank; waits. @see Collective
  void exchange(std::span<const std::byte> mine, std::span<std::byte> all, void* scratch) {
    detail::require_room_for_all(mine.size(), all.size(), world_, name);
    if (mine.empty()) return;
    handle_->throw_if_failed();
    auto* own = static_cast<std::byte*>(scratch) + static_cast<std::size_t>(rank_) * mine.size();
    device_.upload(own, mine.data(), static_cast<std::int64_t>(mine.size()), stream_);
    enqueue("ncclAllGather", [&](ncclComm_t comm) {
      return ncclAllGather(own, scratch, mine.size(), ncclUint8, comm, stream_);
    });
    if (handle_->watched()) {
      Cuda::Event gathered = device_.make_event();
      device_.record(gathered, stream_);
      handle_->wait(gathered);
    }
    device_.download(all.data(), scratch, world_ * static_cast<std::int64_t>(mine.size()), stream_);
    handle_->throw_if_failed();  // an abort ends the gathering, too
  }

 private:
  Nccl(ncclComm_t comm, cudaStream_t stream, bool owns, const NcclOptions& options) : stream_(stream) {
    int ordinal = 0;
    try {
      shardopt::throw_if_failed(ncclCommUserRank(comm, &rank_), "ncclCommUserRank", comm);
      shardopt::throw_if_failed(ncclCommCount(comm, &world_), "ncclCommCount", comm);
      shardopt::throw_if_failed(ncclCommCuDevice(comm, &ordinal), "ncclCommCuDevice", comm);
      device_ = Cuda(ordinal);
      handle_ = std::make_shared<detail::NcclHandle>(comm, owns, rank_, device_, options);
    } catch (...) {
      if (owns) static_cast<void>(ncclCommDestroy(comm));
      throw;
    }
  }

  /// Who tries to join, for messages: NCCL names the ranks that share a GPU, by its own address.
  [[nodiscard]] static std::string attempt(int rank, int world) {
    int ordinal = 0;
    static_cast<void>(cudaGetDevice(&ordinal));
    return "rank " + std::to_string(rank) + " of " + std::to_string(world) + " on " +
           detail::text_of_device(ordinal);
  }

  [[nodiscard]] static std::string advice(std::string_view reason) {
    return reason.find("uplicate GPU") == std::string_view::npos
               ? ""
               : "; NCCL takes one rank a GPU: let each process select its own (Cuda::select with its local "
                 "rank), or let ranks be threads (Threads<Cuda>), which may share one";
  }

  /// Joins without blocking, so that a rank that never comes is noticed.
  [[nodiscard]] static ncclComm_t join_in_time(const ncclUniqueId& id, int rank, int world,
                                               std::chrono::milliseconds deadline) {
    const auto end = std::chrono::steady_clock::now() + deadline;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t comm = nullptr;
    ncclResult_t status = ncclCommInitRankConfig(&comm, world, id, rank, &config);
    while (status == ncclInProgress && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (ncclCommGetAsyncError(comm, &status) != ncclSuccess) status = ncclInternalError;
    }
    if (status == ncclSuccess) return comm;
    const std::string reason =
        status == ncclInProgress
            ? "not all " + std::to_string(world) + " ranks have come within " +
                  std::to_string(deadline.count()) + " ms"
            : std::string("NCCL reports: ") + ncclGetErrorString(status) + detail::text_of_last(comm);
    if (comm != nullptr) static_cast<void>(ncclCommAbort(comm));
    throw CollectiveError("shardopt: " + attempt(rank, world) + " cannot join: " + reason + advice(reason));
  }

  /// Makes one call of NCCL, and watches for its end.
  template <class Body>
  void enqueue(const char* call, const Body& body) {
    const CudaDeviceGuard guard(device_.ordinal());
    handle_->enqueue(call, stream_, body);
  }

  /// Calls for every block that is not empty, as one NCCL group.
  template <class Body>
  void enqueue_blocks(const char* call, void* base, BlockLayout blocks, Dtype type, const Body& body) {
    enqueue_group([&](ncclComm_t comm) {
      for (int root = 0; root < world_; ++root) {
        const Range block = blocks.block(root);
        if (!block.empty())
          require_queued(body(detail::element_of(base, block.begin, type), size(block), root, comm), call,
                         comm);
      }
    });
  }

  /// One NCCL group; closed even if a call in it fails.
  template <class Body>
  void enqueue_group(const Body& body) {
    const CudaDeviceGuard guard(device_.ordinal());
    handle_->enqueue("ncclGroupEnd", stream_, [&](ncclComm_t comm) {
      shardopt::throw_if_failed(ncclGroupStart(), "ncclGroupStart", comm);
      try {
        body(comm);
      } catch (...) {
        static_cast<void>(ncclGroupEnd());
        throw;
      }
      return ncclGroupEnd();
    });
  }

  /// Inside a group nothing has begun yet, whatever the communicator's mode.
  static void require_queued(ncclResult_t status, const char* call, ncclComm_t comm) {
    if (status != ncclInProgress) shardopt::throw_if_failed(status, call, comm);
  }

  void reduce_scatter_ordered(void* base, BlockLayout blocks, Dtype type, void* workspace) {
    const Range own = blocks.block(rank_);
    if (world_ > 1) {
      enqueue_group([&](ncclComm_t comm) {
        for (int peer = 0; peer < world_; ++peer) {
          if (peer == rank_) continue;
          const Range theirs = blocks.block(peer);
          if (!theirs.empty()) {
            require_queued(ncclSend(detail::element_of(base, theirs.begin, type), size(theirs),
                                    nccl_type(type), peer, comm, stream_),
                           "ncclSend", comm);
          }
          if (!own.empty()) {
            void* slot = detail::element_of(workspace, (peer < rank_ ? peer : peer - 1) * own.size(), type);
            require_queued(ncclRecv(slot, size(own), nccl_type(type), peer, comm, stream_), "ncclRecv", comm);
          }
        }
      });
    }
    device_.sum_ranks(type, detail::element_of(base, own.begin, type), workspace, own.size(), rank_, world_,
                      stream_);
  }

  void verify(const detail::CallSignature& mine) {
    if (signatures_ == nullptr) return;
    if (Cuda::capture_of(stream_) != 0)
      throw std::logic_error("shardopt: verifying_calls() waits on the host and cannot be captured");
    std::vector<detail::CallSignature> all(static_cast<std::size_t>(world_));
    exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)), signatures_.get());
    for (int rank = 1; rank < world_; ++rank) {
      const detail::CallSignature& other = all[static_cast<std::size_t>(rank)];
      if (other == all.front()) continue;
      throw CollectiveError("shardopt: ranks call different collectives: rank 0 " + all.front().text() +
                            ", rank " + std::to_string(rank) + " " + other.text());
    }
  }

  [[nodiscard]] static std::size_t size(Range range) noexcept {
    return static_cast<std::size_t>(range.size());
  }

  [[nodiscard]] static ncclDataType_t nccl_type(Dtype type) {
    switch (type) {
      case Dtype::fp32:
        return ncclFloat32;
      case Dtype::bf16:
        return ncclBfloat16;
      case Dtype::fp16:
        return ncclFloat16;
      case Dtype::int64:
        return ncclInt64;
      case Dtype::uint8:
        return ncclUint8;
    }
    throw std::invalid_argument("shardopt: NCCL has no such type");
  }

  cudaStream_t stream_;
  int rank_ = 0;
  int world_ = 1;
  Cuda device_{0};
  std::shared_ptr<detail::NcclHandle> handle_;
  std::shared_ptr<void> signatures_;
};

static_assert(Collective<Nccl>);

}  // namespace shardopt::inline v0
