// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/collective.hpp>
#include <shardopt/zero/bucket_buffers.hpp>
#include <shardopt/zero/observer.hpp>
#include <shardopt/zero/shard_layout.hpp>
#include <shardopt/zero/step_state.hpp>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace shardopt::inline v0::detail {

/// Reduces gradients bucket by bucket onto the ranks that own them, and adds up their squares.
///
/// All ranks start buckets in one order, the last of the flat index first (a backward pass finishes the last
/// layers first); one that is whole early waits for those before it. Work is enqueued on the collective's
/// stream.
template <Collective Comm, class Param, class Grad>
class GradientReducer {
 public:
  using Device = typename Comm::Device;
  using Stream = typename Device::Stream;

  struct Memory {
    Grad* staging;        ///< a bucket, for those that are not contiguous
    void* workspace;      ///< the collective's
    std::int64_t* words;  ///< of StepState
  };

  GradientReducer(const ShardLayout& layout, const EngineBuffers<Param, Grad>& buffers,
                  const std::vector<BucketTiles>& tiles, Reduction reduction, Memory memory,
                  Observer* observer)
      : layout_(&layout), tiles_(&tiles), reduction_(reduction), memory_(memory), observer_(observer) {
    for (const Bucket& bucket : layout.buckets()) {
      Progress progress;
      progress.in_place = bucket.in_place ? buffers.gradient(bucket.segments.front()) : nullptr;
      progress.missing = progress.total = bucket.flat.size();
      buckets_.push_back(std::move(progress));
    }
    restart();
  }

  /// The elements `flat`, no part of which was announced in this step, are written once what `stream` holds
  /// now is done.
  void announce(Range flat, Stream stream, const Device& device) {
    ++announcement_;
    const Range range = layout_->buckets_of(flat);
    for (std::int64_t b = range.begin; b < range.end; ++b) {
      Progress& bucket = progress(b);
      bucket.missing -= intersection(flat, layout_->buckets()[static_cast<std::size_t>(b)].flat).size();
      mark(bucket, stream, device);
    }
  }

  /// Enqueues the reduction of every bucket that is whole and whose turn it is. @return false when there is
  /// none left
  [[nodiscard]] bool reduce_next(Comm& comm) {
    if (next_ < 0 || progress(next_).missing > 0) return false;
    reduce(comm, next_);
    --next_;
    return true;
  }

  /// What was not announced counts as written once what `stream` holds now is done.
  void announce_rest(Stream stream, const Device& device) {
    ++announcement_;
    for (std::int64_t b = next_; b >= 0; --b) {
      if (progress(b).missing == 0) continue;
      progress(b).missing = 0;
      mark(progress(b), stream, device);
    }
  }

  /// Refuses gradients of this step that were announced outside the capture that the step is in: a replay
  /// would not wait for them.
  /// @throws std::logic_error
  void require_capture(std::uint64_t capture) const {
    for (const Progress& bucket : buckets_) {
      for (const Producer& producer : bucket.producers) {
        if (!producer.active || Device::capture_of(producer.written) == capture) continue;
        throw std::logic_error(
            "shardopt: gradients of this step were announced outside the stream capture that it is in");
      }
    }
  }

  /// The bucket whose turn it is, -1 after the last: for messages.
  [[nodiscard]] std::int64_t next() const noexcept { return next_; }

  /// For the next step.
  void restart() noexcept {
    next_ = static_cast<std::int64_t>(buckets_.size()) - 1;
    for (Progress& bucket : buckets_) {
      bucket.missing = bucket.total;
      for (Producer& producer : bucket.producers) producer.active = false;
    }
  }

 private:
  /// A stream that wrote gradients of a bucket, and an event behind its last write.
  struct Producer {
    Stream stream;
    typename Device::Event written;
    std::int64_t announcement;  ///< that the event stands behind
    bool active;
  };

  struct Progress {
    Grad* in_place = nullptr;
    std::int64_t total = 0;
    std::int64_t missing = 0;  ///< elements not announced yet
    std::vector<Producer> producers = {};
  };

  [[nodiscard]] Progress& progress(std::int64_t bucket) noexcept {
    return buckets_[static_cast<std::size_t>(bucket)];
  }

  void mark(Progress& bucket, Stream stream, const Device& device) const {
    for (Producer& producer : bucket.producers) {
      if (!(producer.stream == stream)) continue;
      device.record(producer.written, stream);
      producer.announcement = announcement_;
      producer.active = true;
      return;
    }
    bucket.producers.push_back({stream, device.make_event(), announcement_, true});
    device.record(bucket.producers.back().written, stream);
  }

  /// The collective's stream goes on behind a producer's last write, unless it does already: the next bucket
  /// of the same announcement.
  void wait_for(const Producer& producer, const Comm& comm) {
    for (auto& [stream, announcement] : waited_) {
      if (!(stream == producer.stream)) continue;
      if (announcement < producer.announcement) comm.device().wait(comm.stream(), producer.written);
      announcement = (std::max)(announcement, producer.announcement);
      return;
    }
    comm.device().wait(comm.stream(), producer.written);
    waited_.emplace_back(producer.stream, producer.announcement);
  }

  void reduce(Comm& comm, std::int64_t index) {
    const Device& device = comm.device();
    const Stream stream = comm.stream();
    const Bucket& bucket = layout_->buckets()[static_cast<std::size_t>(index)];
    const BucketTiles& tiles = (*tiles_)[static_cast<std::size_t>(index)];
    for (const Producer& producer : progress(index).producers) {
      if (producer.active) wait_for(producer, comm);
    }
    Grad* const base = bucket.in_place ? progress(index).in_place : memory_.staging;
    if (!bucket.in_place)
      device.pack(tiles.staged.tiles, tiles.staged.count, TileField::gradient, memory_.staging, stream);
    comm.reduce_scatter(base, bucket.blocks(), dtype_of<Grad>, reduction_, memory_.workspace);
    if (layout_->updates_everything()) comm.all_gather(base, bucket.blocks(), dtype_of<Grad>);
    if (!bucket.in_place) {
      const TileRun& reduced = layout_->updates_everything() ? tiles.staged : tiles.staged_own;
      device.unpack(reduced.tiles, reduced.count, TileField::gradient, memory_.staging, stream);
    }
    device.template add_squares<Grad>(tiles.reduced.tiles, tiles.reduced.count,
                                      memory_.words + control_word::squares,
                                      memory_.words + control_word::non_finite, stream);
    if (observer_ != nullptr)
      observer_->bucket_reduced(index, bucket.flat.size() * static_cast<std::int64_t>(sizeof(Grad)));
  }

  const ShardLayout* layout_;
  const std::vector<BucketTiles>* tiles_;
  Reduction reduction_;
  Memory memory_;
  Observer* observer_;
  std::vector<Progress> buckets_;
  std::int64_t next_ = -1;
  std::int64_t announcement_ = 0;
  std::vector<std::pair<Stream, std::int64_t>>
      waited_;  ///< by stream: the last announcement that the collective's stream is behind
};

}  // namespace shardopt::inline v0::detail
