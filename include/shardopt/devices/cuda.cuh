// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/dtype.hpp>
#include <shardopt/core/error.hpp>
#include <shardopt/core/tile.hpp>
#include <shardopt/devices/cuda_choice.cuh>
#include <shardopt/devices/cuda_device_guard.cuh>
#include <shardopt/devices/cuda_error.cuh>
#include <shardopt/devices/cuda_kernels.cuh>
#include <shardopt/devices/cuda_norm.cuh>
#include <shardopt/devices/cuda_update.cuh>
#include <shardopt/devices/update.hpp>
#include <shardopt/rules/rule.hpp>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace shardopt::inline v0 {

/// CUDA's bfloat16.
template <>
struct DtypeOf<__nv_bfloat16> {
  /// The Dtype.
  static constexpr Dtype value = Dtype::bf16;
};
/// CUDA's IEEE half.
template <>
struct DtypeOf<__half> {
  /// The Dtype.
  static constexpr Dtype value = Dtype::fp16;
};

/// One GPU. Calls enqueue on the stream they are given and do not wait, unless they say so. The current
/// device of the calling thread is left as it was (see CudaDeviceGuard). Calls that are not noexcept throw
/// CudaError where CUDA reports a failure: of the call itself, or of work that was enqueued before.
class Cuda {
 public:
  /// What work is enqueued on.
  using Stream = cudaStream_t;

  /// A CUDA event without timing. Move-only. What it marks outside captures and what it marks in them are two
  /// things: a capture, of which nothing runs yet, must not change what the host and other streams wait for.
  class Event {
   public:
    Event() = default;
    /// Owns the event from now on.
    explicit Event(cudaEvent_t event) noexcept : event_(event) {}
    /// Moves.
    Event(Event&& other) noexcept
        : event_(std::exchange(other.event_, nullptr)),
          captured_(std::exchange(other.captured_, nullptr)),
          capture_(other.capture_) {}
    /// Exchanges the two.
    Event& operator=(Event&& other) noexcept {
      std::swap(event_, other.event_);
      std::swap(captured_, other.captured_);
      std::swap(capture_, other.capture_);
      return *this;
    }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    ~Event() {
      if (event_ != nullptr) static_cast<void>(cudaEventDestroy(event_));
      if (captured_ != nullptr) static_cast<void>(cudaEventDestroy(captured_));
    }
    /// The event itself, outside captures; null if empty.
    [[nodiscard]] cudaEvent_t get() const noexcept { return event_; }

   private:
    friend class Cuda;
    cudaEvent_t event_ = nullptr;
    cudaEvent_t captured_ = nullptr;  ///< in captures; made by the first record there
    std::uint64_t capture_ = 0;       ///< that the last record was part of
  };

  /// As it stands in messages.
  static constexpr std::string_view name = "cuda";

  /// @param ordinal  as cudaSetDevice counts
  explicit Cuda(int ordinal) noexcept : ordinal_(ordinal) {}
  /// The device that is current on the calling thread; `stream` must be one of its streams. @throws CudaError
  [[nodiscard]] static Cuda of(Stream) {
    int ordinal = 0;
    throw_if_failed(cudaGetDevice(&ordinal), "cudaGetDevice");
    return Cuda(ordinal);
  }
  /// Makes a device the calling thread's current one: ProcessPlace::local_rank, where a process has one GPU.
  /// @throws std::invalid_argument for a device that does not exist, naming those that do; CudaError
  static Cuda select(int ordinal) {
    detail::require_device(ordinal);
    throw_if_failed(cudaSetDevice(ordinal), "cudaSetDevice");
    return Cuda(ordinal);
  }
  /// As cudaSetDevice counts.
  [[nodiscard]] int ordinal() const noexcept { return ordinal_; }

  /// Device memory, aligned to 256 bytes. @throws CudaError
  [[nodiscard]] void* allocate(std::int64_t bytes) const {
    const CudaDeviceGuard guard(ordinal_);
    void* memory = nullptr;
    throw_unless_allocated(cudaMalloc(&memory, static_cast<std::size_t>(bytes)), "cudaMalloc", bytes);
    return memory;
  }
  /// Gives back what allocate gave.
  void deallocate(void* memory) const noexcept { static_cast<void>(cudaFree(memory)); }
  /// Host memory that the device can write. @throws CudaError
  [[nodiscard]] void* allocate_pinned(std::int64_t bytes) const {
    const CudaDeviceGuard guard(ordinal_);
    void* memory = nullptr;
    throw_unless_allocated(
        cudaHostAlloc(&memory, static_cast<std::size_t>(bytes), cudaHostAllocPortable | cudaHostAllocMapped),
        "cudaHostAlloc", bytes);
    return memory;
  }
  /// Gives back what allocate_pinned gave.
  void deallocate_pinned(void* memory) const noexcept { static_cast<void>(cudaFreeHost(memory)); }

  /// An event that nothing was recorded in.
  [[nodiscard]] Event make_event() const {
    const CudaDeviceGuard guard(ordinal_);
    cudaEvent_t event = nullptr;
    throw_if_failed(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    return Event(event);
  }
  /// Marks what the stream holds now.
  void record(Event& event, Stream stream) const {
    const CudaDeviceGuard guard(ordinal_);
    const std::uint64_t capture = capture_of(stream);
    if (capture != 0 && event.captured_ == nullptr) {
      throw_if_failed(cudaEventCreateWithFlags(&event.captured_, cudaEventDisableTiming),
                      "cudaEventCreateWithFlags");
    }
    throw_if_failed(cudaEventRecord(capture != 0 ? event.captured_ : event.event_, stream),
                    "cudaEventRecord");
    event.capture_ = capture;  // at the end: what failed has marked nothing
  }
  /// The stream goes on when what the last record marks is done.
  void wait(Stream stream, const Event& event) const {
    const CudaDeviceGuard guard(ordinal_);
    throw_if_failed(cudaStreamWaitEvent(stream, event.capture_ != 0 ? event.captured_ : event.event_, 0),
                    "cudaStreamWaitEvent");
  }
  /// Like wait(), but outside captures for the last record outside them, and in one for the last record in
  /// it: records of another capture, or of none, order nothing there. Replays are ordered by the stream that
  /// they are launched in, and what was captured is joined to that stream.
  void wait_in_capture(Stream stream, const Event& event) const {
    const std::uint64_t capture = capture_of(stream);
    if (capture != 0 && event.capture_ != capture) return;
    const CudaDeviceGuard guard(ordinal_);
    throw_if_failed(cudaStreamWaitEvent(stream, capture != 0 ? event.captured_ : event.event_, 0),
                    "cudaStreamWaitEvent");
  }
  /// The capture that a stream is in, 0 for none. @throws CudaError
  [[nodiscard]] static std::uint64_t capture_of(Stream stream) {
#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
    if (stream == cudaStreamLegacy) return 0;
#else
    if (stream == nullptr || stream == cudaStreamLegacy) return 0;  // the legacy stream cannot be captured
#endif
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    throw_if_failed(cudaStreamGetCaptureInfo(stream, &status, &id), "cudaStreamGetCaptureInfo");
    return status == cudaStreamCaptureStatusActive ? id : 0;
  }
  /// The capture that an event was last recorded in, 0 for none.
  [[nodiscard]] static std::uint64_t capture_of(const Event& event) noexcept { return event.capture_; }

  /// Waits for what the last record outside captures marks.
  void synchronize(const Event& event) const {
    throw_if_failed(cudaEventSynchronize(event.get()), "cudaEventSynchronize");
  }
  /// Waits.
  void synchronize(Stream stream) const {
    const CudaDeviceGuard guard(ordinal_);
    throw_if_failed(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }

  /// Waits for a stream or an event, and reports no failure: for destructors.
  template <class StreamOrEvent>
  void finish(const StreamOrEvent& what) const noexcept {
    try {
      synchronize(what);
    } catch (const CudaError&) {
      // The failure was reported by the call that caused it, or will be by the engine's next one.
    }
  }

  /// Host memory to device memory; pageable memory may be reused on return.
  void upload(void* to, const void* from, std::int64_t bytes, Stream stream) const {
    if (bytes == 0) return;
    const CudaDeviceGuard guard(ordinal_);
    throw_if_failed(
        cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice, stream),
        "cudaMemcpyAsync");
  }
  /// Device memory to host memory; waits.
  void download(void* to, const void* from, std::int64_t bytes, Stream stream) const {
    if (bytes == 0) return;
    const CudaDeviceGuard guard(ordinal_);
    throw_if_failed(
        cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost, stream),
        "cudaMemcpyAsync");
    throw_if_failed(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
  /// Zeroes bytes of device memory.
  void fill_zero(void* to, std::int64_t bytes, Stream stream) const {
    if (bytes == 0) return;
    const CudaDeviceGuard guard(ordinal_);
    throw_if_failed(cudaMemsetAsync(to, 0, static_cast<std::size_t>(bytes), stream), "cudaMemsetAsync");
  }

  /// Runs a functor once, by a single thread.
  template <class Functor>
  void invoke(const Functor& functor, Stream stream) const {
    launch(detail::invoke_kernel<Functor>, 1, 1, stream, functor);
  }

  /// One bucket's update. @see UpdateArguments
  template <class Rule, class Precision>
  void update(const UpdateArguments<Rule, Precision>& arguments, Stream stream) const {
    if (arguments.tile_count == 0) return;
    if constexpr (may_be_stateless<Rule>) {
      if (!arguments.stateful) {
        launch(detail::update_kernel<false, Rule, Precision>, arguments.tile_count, detail::block_threads,
               stream, arguments);
        return;
      }
    }
    launch(detail::update_kernel<true, Rule, Precision>, arguments.tile_count, detail::block_threads, stream,
           arguments);
  }

  /// Adds the squares of the tiles' gradients to an exact sum's limbs, and counts what is not finite.
  template <class Grad>
  void add_squares(const Tile* tiles, std::int64_t tile_count, std::int64_t* limbs, std::int64_t* non_finite,
                   Stream stream) const {
    if (tile_count == 0) return;
    launch(detail::add_squares_kernel<Grad>, (std::min)(tile_count, most_blocks), detail::block_threads,
           stream, tiles, tile_count, reinterpret_cast<unsigned long long*>(limbs),
           reinterpret_cast<unsigned long long*>(non_finite));
  }

  /// Copies tiles' elements to a staging buffer at their state index. `field`: TileField::parameter or
  /// TileField::gradient.
  template <class T>
  void pack(const Tile* tiles, std::int64_t tile_count, TileField field, T* staging, Stream stream) const {
    if (tile_count > 0)
      launch(detail::pack_kernel<T>, tile_count, detail::block_threads, stream, tiles, field, staging);
  }
  /// The way back.
  template <class T>
  void unpack(const Tile* tiles, std::int64_t tile_count, TileField field, const T* staging,
              Stream stream) const {
    if (tile_count > 0)
      launch(detail::unpack_kernel<T>, tile_count, detail::block_threads, stream, tiles, field, staging);
  }

  /// master[state index] = parameter, for the tiles' elements.
  template <class Param>
  void initialize_masters(const Tile* tiles, std::int64_t tile_count, float* master, Stream stream) const {
    if (tile_count > 0) {
      launch(detail::initialize_masters_kernel<Param>, tile_count, detail::block_threads, stream, tiles,
             master);
    }
  }

  /// parameter = master[state index], rounded as the update rounds, for the tiles' elements.
  template <class Param>
  void round_masters(const Tile* tiles, std::int64_t tile_count, const float* master, Stream stream) const {
    if (tile_count > 0) {
      launch(detail::round_masters_kernel<Param>, tile_count, detail::block_threads, stream, tiles, master);
    }
  }

  /// *sum += digest of `count` elements of a 2- or 4-byte type, the first of which has index `first`.
  template <class Bits>
  void add_digest(const Bits* elements, std::int64_t count, std::uint64_t first, std::uint64_t* sum,
                  Stream stream) const {
    if (count == 0) return;
    launch(detail::add_digest_kernel<Bits>, blocks_for(count), detail::block_threads, stream, elements, count,
           first, reinterpret_cast<unsigned long long*>(sum));
  }

  /// own[i] = sum over ranks in the fixed order. @param received  the other ranks' contributions, in rank
  /// order  @pre world <= most_ordered_ranks
  /// @throws std::invalid_argument for a type that is not fp32, bf16 or fp16
  void sum_ranks(Dtype type, void* own, const void* received, std::int64_t count, int rank, int world,
                 Stream stream) const {
    switch (type) {
      case Dtype::fp32:
        return sum_typed<float>(own, received, count, rank, world, stream);
      case Dtype::bf16:
        return sum_typed<bf16>(own, received, count, rank, world, stream);
      case Dtype::fp16:
        return sum_typed<fp16>(own, received, count, rank, world, stream);
      default:
        throw_not_summable(type);
    }
  }

  /// Device memory to device memory, of peers too, or to memory that allocate_pinned gave and back. Enqueues.
  void copy(void* to, const void* from, std::int64_t bytes, Stream stream) const {
    if (bytes == 0) return;
    const CudaDeviceGuard guard(ordinal_);
    throw_if_failed(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, stream),
                    "cudaMemcpyAsync");
  }

  /// to[i] = sum over ranks in the fixed order. @param sources  one buffer a rank; `to` may be one of them
  /// @throws std::invalid_argument for a type that is not fp32, bf16 or fp16
  void sum_sources(Dtype type, const detail::Sources& sources, int world, void* to, std::int64_t count,
                   Stream stream) const {
    if (count == 0) return;
    const auto run = [&](auto* typed) {
      using T = std::remove_pointer_t<decltype(typed)>;
      launch(detail::sum_sources_kernel<T>, blocks_for(count), detail::block_threads, stream, sources, world,
             typed, count);
    };
    switch (type) {
      case Dtype::fp32:
        return run(static_cast<float*>(to));
      case Dtype::bf16:
        return run(static_cast<bf16*>(to));
      case Dtype::fp16:
        return run(static_cast<fp16*>(to));
      default:
        throw_not_summable(type);
    }
  }

  /// to[i] = sum over ranks of integers. @pre count <= detail::block_threads
  void sum_words(const detail::Sources& sources, int world, std::int64_t* to, std::int64_t count,
                 Stream stream) const {
    if (count == 0) return;
    launch(detail::sum_words_kernel<unsigned long long>, 1, detail::block_threads, stream, sources, world,
           reinterpret_cast<unsigned long long*>(to), count);
  }

 private:
  static void throw_unless_allocated(cudaError_t status, const char* call, std::int64_t bytes) {
    try {
      throw_if_failed(status, call);
    } catch (CudaError& error) {
      error.add_context(std::to_string(bytes) + " bytes were asked for");
      throw;
    }
  }

  [[noreturn]] static void throw_not_summable(Dtype type) {
    throw std::invalid_argument("shardopt: ordered sums take fp32, bf16 and fp16, not " +
                                std::string(name_of(type)));
  }

  /// Enough to fill any GPU; kernels go on in strides. The number changes no bit.
  static constexpr std::int64_t most_blocks = 2048;

  [[nodiscard]] static std::int64_t blocks_for(std::int64_t elements) noexcept {
    return (std::min)((elements + detail::block_threads - 1) / detail::block_threads, most_blocks);
  }

  template <class T>
  void sum_typed(void* own, const void* received, std::int64_t count, int rank, int world,
                 Stream stream) const {
    if (count == 0) return;
    launch(detail::sum_ranks_kernel<T>, blocks_for(count), detail::block_threads, stream,
           static_cast<T*>(own), static_cast<const T*>(received), count, rank, world);
  }

  template <class... Parameters, class... Arguments>
  void launch(void (*kernel)(Parameters...), std::int64_t blocks, int threads, Stream stream,
              Arguments&&... arguments) const {
    const CudaDeviceGuard guard(ordinal_);
    cudaLaunchConfig_t configuration{};
    configuration.gridDim = dim3(static_cast<unsigned>(blocks));
    configuration.blockDim = dim3(static_cast<unsigned>(threads));
    configuration.stream = stream;
    throw_if_failed(cudaLaunchKernelEx(&configuration, kernel, std::forward<Arguments>(arguments)...),
                    "cudaLaunchKernelEx");
  }

  int ordinal_;
};

}  // namespace shardopt::inline v0
