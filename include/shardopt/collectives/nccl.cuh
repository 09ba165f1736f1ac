// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/collective.hpp>
#include <shardopt/collectives/nccl_error.cuh>
#include <shardopt/core/digest.hpp>
#include <shardopt/devices/cuda.cuh>

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace shardopt::inline v0 {

/// Ranks are GPUs that talk by NCCL, one a GPU, in one process or many.
///
/// NCCL is called only inside the library's own calls, on the stream given here, in program order: the engine
/// may use the same communicator between them. Equal blocks are sent by reduce-scatter and all-gather in
/// place, others by one group of reductions or broadcasts. `ordered` reductions send each slice to its owner
/// (the same bytes) and add there.
class Nccl {
 public:
  /// Where buffers live and kernels run.
  using Device = Cuda;
  /// As it stands in messages.
  static constexpr std::string_view name = "nccl";

  /// The engine's communicator, used on the engine's stream; both must outlive this. The communicator's
  /// device may differ from the current one. @throws NcclError if the communicator is not usable
  [[nodiscard]] static Nccl borrow(ncclComm_t comm, cudaStream_t stream) { return Nccl(comm, stream, false); }

  /// A communicator of its own on the current device. Collective; waits for the other ranks.
  /// @param id  the same on all ranks, from ncclGetUniqueId on one of them
  /// @throws std::invalid_argument for a rank outside the world; NcclError
  [[nodiscard]] static Nccl create(const ncclUniqueId& id, int rank, int world, cudaStream_t stream) {
    if (world < 1 || rank < 0 || rank >= world) {
      throw std::invalid_argument("shardopt: rank " + std::to_string(rank) + " of a world of " +
                                  std::to_string(world) + " does not exist");
    }
    ncclComm_t comm = nullptr;
    throw_if_failed(ncclCommInitRank(&comm, world, id, rank), "ncclCommInitRank");
    return Nccl(comm, stream, true);
  }

  /// Moves; what is moved from is no rank any more.
  Nccl(Nccl&& other) noexcept
      : comm_(std::exchange(other.comm_, nullptr)),
        stream_(other.stream_),
        owns_(std::exchange(other.owns_, false)),
        rank_(other.rank_),
        world_(other.world_),
        device_(other.device_),
        signatures_(std::exchange(other.signatures_, nullptr)) {}
  /// Exchanges the two.
  Nccl& operator=(Nccl&& other) noexcept {
    std::swap(comm_, other.comm_);
    std::swap(stream_, other.stream_);
    std::swap(owns_, other.owns_);
    std::swap(rank_, other.rank_);
    std::swap(world_, other.world_);
    std::swap(device_, other.device_);
    std::swap(signatures_, other.signatures_);
    return *this;
  }
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;
  ~Nccl() {
    if (signatures_ != nullptr) device_.deallocate(signatures_);
    if (owns_ && comm_ != nullptr) static_cast<void>(ncclCommDestroy(comm_));
  }

  /// For debugging: from now on every call first compares operation, type, count, root and blocks with the
  /// other ranks', and waits for that. Where they differ every rank gets a CollectiveError that names both,
  /// instead of a hang or wrong sums. Costs a small all-gather and a wait a call, and world · 64 bytes of
  /// device memory that no MemoryPlan counts.
  [[nodiscard]] Nccl verifying_calls() && {
    if (signatures_ == nullptr)
      signatures_ = device_.allocate(world_ * static_cast<std::int64_t>(sizeof(Signature)));
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
  /// The communicator itself.
  [[nodiscard]] ncclComm_t native() const noexcept { return comm_; }

  /// Whether gradients of that type can be reduced so.
  [[nodiscard]] static bool supports(Reduction, Dtype) noexcept { return true; }
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
  void reduce_scatter(void* base, BlockLayout blocks, Dtype type, Reduction reduction, void* workspace) {
    verify({.operation = operation_reduce_scatter,
            .type = type,
            .count = blocks.elements(),
            .layout = digest_of(blocks, reduction)});
    if (blocks.elements() == 0) return;
    if (reduction == Reduction::ordered) return reduce_scatter_ordered(base, blocks, type, workspace);
    const CudaDeviceGuard guard(device_.ordinal());
    if (blocks.uniform()) {
      const Range own = blocks.block(rank_);
      throw_if_failed(ncclReduceScatter(base, at(base, own.begin, type), size(own), native(type), ncclSum,
                                        comm_, stream_),
                      "ncclReduceScatter", comm_);
      return;
    }
    grouped([&] {
      for (int root = 0; root < world_; ++root) {
        const Range block = blocks.block(root);
        if (block.empty()) continue;
        void* data = at(base, block.begin, type);
        throw_if_failed(ncclReduce(data, root == rank_ ? data : nullptr, size(block), native(type), ncclSum,
                                   root, comm_, stream_),
                        "ncclReduce", comm_);
      }
    });
  }

  /// Block r of `base` becomes rank r's on every rank. @see Collective
  void all_gather(void* base, BlockLayout blocks, Dtype type) {
    verify({.operation = operation_all_gather,
            .type = type,
            .count = blocks.elements(),
            .layout = digest_of(blocks, Reduction::native)});
    if (blocks.elements() == 0) return;
    const CudaDeviceGuard guard(device_.ordinal());
    if (blocks.uniform()) {
      const Range own = blocks.block(rank_);
      throw_if_failed(ncclAllGather(at(base, own.begin, type), base, size(own), native(type), comm_, stream_),
                      "ncclAllGather", comm_);
      return;
    }
    grouped([&] {
      for (int root = 0; root < world_; ++root) {
        const Range block = blocks.block(root);
        if (block.empty()) continue;
        void* data = at(base, block.begin, type);
        throw_if_failed(ncclBroadcast(data, data, size(block), native(type), root, comm_, stream_),
                        "ncclBroadcast", comm_);
      }
    });
  }

  /// Sums 64-bit integers over the ranks, modulo 2^64. @see Collective
  void all_reduce(std::int64_t* values, std::int64_t count) {
    verify({.operation = operation_all_reduce, .type = Dtype::int64, .count = count});
    if (count == 0) return;
    const CudaDeviceGuard guard(device_.ordinal());
    throw_if_failed(
        ncclAllReduce(values, values, static_cast<std::size_t>(count), ncclInt64, ncclSum, comm_, stream_),
        "ncclAllReduce", comm_);
  }

  /// Rank `root`'s bytes replace the others'. @see Collective
  void broadcast(void* data, std::int64_t bytes, int root) {
    verify({.operation = operation_broadcast, .type = Dtype::uint8, .count = bytes, .root = root});
    if (bytes == 0) return;
    const CudaDeviceGuard guard(device_.ordinal());
    throw_if_failed(
        ncclBroadcast(data, data, static_cast<std::size_t>(bytes), ncclUint8, root, comm_, stream_),
        "ncclBroadcast", comm_);
  }

  /// Host bytes of every rank to every rank; waits. @see Collective
  void exchange(std::span<const std::byte> mine, std::span<std::byte> all, void* scratch) {
    if (mine.empty()) return;
    const CudaDeviceGuard guard(device_.ordinal());
    auto* own = static_cast<std::byte*>(scratch) + static_cast<std::size_t>(rank_) * mine.size();
    device_.upload(own, mine.data(), static_cast<std::int64_t>(mine.size()), stream_);
    throw_if_failed(ncclAllGather(own, scratch, mine.size(), ncclUint8, comm_, stream_), "ncclAllGather",
                    comm_);
    device_.download(all.data(), scratch, static_cast<std::int64_t>(all.size()), stream_);
  }

 private:
  static constexpr std::int32_t operation_reduce_scatter = 1;
  static constexpr std::int32_t operation_all_gather = 2;
  static constexpr std::int32_t operation_all_reduce = 3;
  static constexpr std::int32_t operation_broadcast = 4;

  /// What ranks must agree on in a call.
  struct alignas(64) Signature {
    std::int32_t operation = 0;
    Dtype type = Dtype::uint8;
    std::int64_t count = 0;
    std::int32_t root = 0;
    std::uint64_t layout = 0;

    bool operator==(const Signature&) const = default;

    [[nodiscard]] std::string text() const {
      constexpr const char* names[] = {"?", "reduce_scatter", "all_gather", "all_reduce", "broadcast"};
      return std::string(names[operation]) + " of " + std::to_string(count) + " " +
             std::string(name_of(type)) + " (root " + std::to_string(root) + ", layout " +
             std::to_string(layout % 10000) + ")";
    }
  };

  Nccl(ncclComm_t comm, cudaStream_t stream, bool owns)
      : comm_(comm), stream_(stream), owns_(owns), rank_(0), world_(1), device_(0) {
    int ordinal = 0;
    try {
      throw_if_failed(ncclCommUserRank(comm, &rank_), "ncclCommUserRank", comm);
      throw_if_failed(ncclCommCount(comm, &world_), "ncclCommCount", comm);
      throw_if_failed(ncclCommCuDevice(comm, &ordinal), "ncclCommCuDevice", comm);
    } catch (...) {
      if (owns) static_cast<void>(ncclCommDestroy(comm));
      throw;
    }
    device_ = Cuda(ordinal);
  }

  void reduce_scatter_ordered(void* base, BlockLayout blocks, Dtype type, void* workspace) {
    const CudaDeviceGuard guard(device_.ordinal());
    const Range own = blocks.block(rank_);
    if (world_ > 1) {
      grouped([&] {
        for (int peer = 0; peer < world_; ++peer) {
          if (peer == rank_) continue;
          const Range theirs = blocks.block(peer);
          if (!theirs.empty()) {
            throw_if_failed(
                ncclSend(at(base, theirs.begin, type), size(theirs), native(type), peer, comm_, stream_),
                "ncclSend", comm_);
          }
          if (!own.empty()) {
            void* slot = at(workspace, (peer < rank_ ? peer : peer - 1) * own.size(), type);
            throw_if_failed(ncclRecv(slot, size(own), native(type), peer, comm_, stream_), "ncclRecv", comm_);
          }
        }
      });
    }
    device_.sum_ranks(type, at(base, own.begin, type), workspace, own.size(), rank_, world_, stream_);
  }

  /// One NCCL group; closed even if a call in it fails.
  template <class Body>
  void grouped(const Body& body) {
    throw_if_failed(ncclGroupStart(), "ncclGroupStart", comm_);
    try {
      body();
    } catch (...) {
      static_cast<void>(ncclGroupEnd());
      throw;
    }
    throw_if_failed(ncclGroupEnd(), "ncclGroupEnd", comm_);
  }

  void verify(const Signature& mine) {
    if (signatures_ == nullptr) return;
    std::vector<Signature> all(static_cast<std::size_t>(world_));
    exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)), signatures_);
    for (int rank = 1; rank < world_; ++rank) {
      const Signature& other = all[static_cast<std::size_t>(rank)];
      if (other == all.front()) continue;
      throw CollectiveError("shardopt: ranks call different collectives: rank 0 " + all.front().text() +
                            ", rank " + std::to_string(rank) + " " + other.text());
    }
  }

  [[nodiscard]] static std::uint64_t digest_of(BlockLayout blocks, Reduction reduction) noexcept {
    Digest digest;
    digest.add(static_cast<std::uint64_t>(reduction));
    for (const std::int64_t border : blocks.borders) digest.add(static_cast<std::uint64_t>(border));
    return digest.value();
  }

  [[nodiscard]] static void* at(void* base, std::int64_t element, Dtype type) noexcept {
    return static_cast<std::byte*>(base) + element * static_cast<std::int64_t>(size_of(type));
  }
  [[nodiscard]] static std::size_t size(Range range) noexcept {
    return static_cast<std::size_t>(range.size());
  }

  [[nodiscard]] static ncclDataType_t native(Dtype type) {
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

  ncclComm_t comm_;
  cudaStream_t stream_;
  bool owns_;
  int rank_;
  int world_;
  Cuda device_;
  void* signatures_ = nullptr;
};

static_assert(Collective<Nccl>);

}  // namespace shardopt::inline v0
