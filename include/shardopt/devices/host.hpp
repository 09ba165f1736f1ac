// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/core/digest.hpp>
#include <shardopt/core/error.hpp>
#include <shardopt/core/rank_tree.hpp>
#include <shardopt/devices/host_copy.hpp>
#include <shardopt/devices/host_norm.hpp>
#include <shardopt/devices/host_update.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <span>
#include <stdexcept>
#include <string_view>

namespace shardopt::inline v0 {

/// The processor: memory is ordinary memory, every call is done when it returns, on the calling thread, which
/// has others help it with copies of many megabytes.
///
/// On x86-64 the kernels need a processor with AVX2, FMA and F16C (all from 2013 on; every one with AVX2 has
/// F16C).
class Host {
 public:
  /// Stands where a device has a stream: work is done in program order.
  struct Stream {
    /// All are equal.
    friend bool operator==(Stream, Stream) = default;
  };
  /// Stands where a device has an event: whatever it marks has happened.
  class Event {};

  /// As it stands in messages.
  static constexpr std::string_view name = "host";

  /// @throws Error if the processor lacks the instructions
  Host() {
#if SHARDOPT_HOST_AVX2
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
      throw Error("shardopt: the host's kernels need a processor with AVX2 and FMA");
    }
#endif
  }
  /// The processor. @throws Error if it lacks the instructions
  [[nodiscard]] static Host of(Stream) { return {}; }

  /// Memory, aligned to 256 bytes.
  [[nodiscard]] void* allocate(std::int64_t bytes) const {
    return ::operator new(static_cast<std::size_t>(bytes), alignment);
  }
  /// Gives back what allocate gave.
  void deallocate(void* memory) const noexcept { ::operator delete(memory, alignment); }
  /// The same.
  [[nodiscard]] void* allocate_pinned(std::int64_t bytes) const { return allocate(bytes); }
  /// Gives back what allocate_pinned gave.
  void deallocate_pinned(void* memory) const noexcept { deallocate(memory); }

  /// An event that nothing was recorded in.
  [[nodiscard]] Event make_event() const noexcept { return {}; }
  /// Marks what the stream holds now.
  void record(Event&, Stream) const noexcept {}
  /// The stream goes on when what the event marks is done.
  void wait(Stream, const Event&) const noexcept {}
  /// The same.
  void wait_in_capture(Stream, const Event&) const noexcept {}
  /// Nothing is ever captured.
  [[nodiscard]] static std::uint64_t capture_of(Stream) noexcept { return 0; }
  /// Nothing is ever captured.
  [[nodiscard]] static std::uint64_t capture_of(const Event&) noexcept { return 0; }
  /// Nothing to wait for.
  void synchronize(const Event&) const noexcept {}
  /// Nothing to wait for.
  void synchronize(Stream) const noexcept {}
  /// Nothing to wait for.
  void finish(Stream) const noexcept {}
  /// Nothing to wait for.
  void finish(const Event&) const noexcept {}

  /// Host memory to device memory; `from` may be reused on return.
  void upload(void* to, const void* from, std::int64_t bytes, Stream) const noexcept {
    detail::copy_on_host(to, from, bytes);
  }
  /// Device memory to host memory; waits.
  void download(void* to, const void* from, std::int64_t bytes, Stream) const noexcept {
    detail::copy_on_host(to, from, bytes);
  }
  /// Device memory to device memory, or to memory that allocate_pinned gave and back.
  void copy(void* to, const void* from, std::int64_t bytes, Stream) const noexcept {
    detail::copy_on_host(to, from, bytes);
  }
  /// Zeroes bytes of device memory.
  void fill_zero(void* to, std::int64_t bytes, Stream) const noexcept {
    if (bytes > 0) std::memset(to, 0, static_cast<std::size_t>(bytes));
  }

  /// Runs a functor once, by a single thread.
  template <class Functor>
  void invoke(const Functor& functor, Stream) const {
    const FloatEnvironment environment;
    functor();
  }

  /// One bucket's update. @see UpdateArguments
  template <class Rule, class Precision>
  void update(const UpdateArguments<Rule, Precision>& arguments, Stream) const noexcept {
    detail::update_on_host(arguments);
  }

  /// Adds the squares of the tiles' gradients to an exact sum's limbs, and counts what is not finite.
  template <class Grad>
  void add_squares(const Tile* tiles, std::int64_t tile_count, std::int64_t* limbs, std::int64_t* non_finite,
                   Stream) const noexcept {
    detail::add_squares_on_host<Grad>(tiles, tile_count, limbs, non_finite);
  }

  /// Copies tiles' elements to a staging buffer at their state index. `field`: TileField::parameter or
  /// TileField::gradient.
  template <class T>
  void pack(const Tile* tiles, std::int64_t tile_count, TileField field, T* staging, Stream) const noexcept {
    for (const Tile& tile : std::span(tiles, static_cast<std::size_t>(tile_count))) {
      std::memcpy(staging + tile.state, tile.address(field), tile.count * sizeof(T));
    }
  }
  /// The way back.
  template <class T>
  void unpack(const Tile* tiles, std::int64_t tile_count, TileField field, const T* staging,
              Stream) const noexcept {
    for (const Tile& tile : std::span(tiles, static_cast<std::size_t>(tile_count))) {
      std::memcpy(tile.address(field), staging + tile.state, tile.count * sizeof(T));
    }
  }

  /// master[state index] = parameter, for the tiles' elements.
  template <class Param>
  void initialize_masters(const Tile* tiles, std::int64_t tile_count, float* master, Stream) const noexcept {
    for (const Tile& tile : std::span(tiles, static_cast<std::size_t>(tile_count))) {
      const auto* parameter = static_cast<const Param*>(tile.parameter);
      for (std::uint32_t i = 0; i < tile.count; ++i) master[tile.state + i] = to_float(parameter[i]);
    }
  }

  /// parameter = master[state index], rounded as the update rounds, for the tiles' elements.
  template <class Param>
  void round_masters(const Tile* tiles, std::int64_t tile_count, const float* master, Stream) const noexcept {
    for (const Tile& tile : std::span(tiles, static_cast<std::size_t>(tile_count))) {
      auto* parameter = static_cast<Param*>(tile.parameter);
      for (std::uint32_t i = 0; i < tile.count; ++i) parameter[i] = from_float<Param>(master[tile.state + i]);
    }
  }

  /// *sum += digest of `count` elements of a 2- or 4-byte type, the first of which has index `first`.
  template <class Bits>
  void add_digest(const Bits* elements, std::int64_t count, std::uint64_t first, std::uint64_t* sum,
                  Stream) const noexcept {
    for (std::int64_t i = 0; i < count; ++i) {
      *sum += detail::element_digest(first + static_cast<std::uint64_t>(i), elements[i]);
    }
  }

  /// Sum over ranks in the fixed order. @param sources  one a rank; `to` may be one of them
  static void sum_ranks(Dtype type, std::span<void* const> sources, void* to, std::int64_t count) {
    const FloatEnvironment environment;
    switch (type) {
      case Dtype::fp32:
        return sum_typed<float>(sources, to, count);
      case Dtype::bf16:
        return sum_typed<bf16>(sources, to, count);
      case Dtype::fp16:
        return sum_typed<fp16>(sources, to, count);
      default:
        throw std::invalid_argument("shardopt: ordered sums take fp32, bf16 and fp16, not " +
                                    std::string(name_of(type)));
    }
  }

 private:
  static constexpr std::align_val_t alignment{256};

  template <class T>
  struct LoadRank {
    const void* const* sources;
    std::int64_t at;
    int count;
    SHARDOPT_TARGET_AVX2 inline __attribute__((always_inline)) detail::Lanes operator()(
        int rank) const noexcept {
      const T* from = static_cast<const T*>(sources[rank]) + at;
      return count == detail::lanes ? load_pack(from) : load_pack(from, count);
    }
  };

  template <class T>
  SHARDOPT_TARGET_AVX2 static void sum_typed(std::span<void* const> sources, void* to,
                                             std::int64_t count) noexcept {
    using namespace detail;
    const int world = static_cast<int>(sources.size());
    for (std::int64_t at = 0; at < count; at += lanes) {
      const int here = static_cast<int>(count - at < lanes ? count - at : lanes);
      const Lanes sum = sum_over_ranks<20, Lanes>(world, LoadRank<T>{sources.data(), at, here});
      store_pack(static_cast<T*>(to) + at, sum, here);
    }
  }
};

}  // namespace shardopt::inline v0
