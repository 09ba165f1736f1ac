// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/collective.hpp>
#include <shardopt/zero/bucket_buffers.hpp>
#include <shardopt/zero/shard_layout.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace shardopt::inline v0::detail {

/// Gathers updated parameters bucket by bucket on the collective's stream, and knows when each bucket has
/// come.
template <Collective Comm, class Param, class Grad>
class ParameterGatherer {
 public:
  using Device = typename Comm::Device;
  using Stream = typename Device::Stream;

  /// @param staging  room for a bucket, for those that are not contiguous
  ParameterGatherer(const ShardLayout& layout, const EngineBuffers<Param, Grad>& buffers,
                    const std::vector<BucketTiles>& tiles, Param* staging, const Device& device)
      : layout_(&layout), tiles_(&tiles), staging_(staging) {
    joined_ = layout.buckets().size();
    for (const Bucket& bucket : layout.buckets()) {
      buckets_.push_back({.in_place = bucket.in_place ? buffers.parameter(bucket.segments.front()) : nullptr,
                          .updated = device.make_event(),
                          .gathered = device.make_event()});
    }
  }

  /// The update of a bucket was enqueued on `stream`: its gather follows.
  void gather(Comm& comm, std::size_t index, Stream stream) {
    const Device& device = comm.device();
    Progress& progress = buckets_[index];
    capture_ = device.capture_of(stream);
    if (capture_ == 0) joined_ = (std::min)(joined_, index);
    if (layout_->updates_everything()) {
      device.record(progress.gathered, stream);
      return;
    }
    device.record(progress.updated, stream);
    device.wait(comm.stream(), progress.updated);
    const Bucket& bucket = layout_->buckets()[index];
    const BucketTiles& tiles = (*tiles_)[index];
    if (bucket.in_place) {
      comm.all_gather(progress.in_place, bucket.blocks(), dtype_of<Param>);
    } else {
      device.pack(tiles.staged_own.tiles, tiles.staged_own.count, TileField::parameter, staging_,
                  comm.stream());
      comm.all_gather(staging_, bucket.blocks(), dtype_of<Param>);
      device.unpack(tiles.staged.tiles, tiles.staged.count, TileField::parameter, staging_, comm.stream());
    }
    device.record(progress.gathered, comm.stream());
  }

  /// `stream` goes on when the parameters of a bucket, and those before it, have come.
  /// @pre what require_waitable() looks at
  void wait(std::size_t index, Stream stream, const Device& device) const {
    device.wait_in_capture(stream, buckets_[index].gathered);
    if (device.capture_of(stream) == 0) joined_ = (std::max)(joined_, index + 1);
  }

  /// Refuses a wait in a capture for what was gathered outside, and nobody has waited for there: the graph
  /// could not hold that wait, and a replay would read too early.
  /// @throws std::logic_error
  void require_waitable(std::size_t index, Stream stream, const Device& device) const {
    const auto capture = device.capture_of(stream);
    if (capture == 0 || capture == capture_ || index < joined_) return;
    throw std::logic_error(
        "shardopt: a capture cannot wait for parameters that were gathered outside it; call wait_parameters "
        "for them before the capture begins");
  }

 private:
  struct Progress {
    Param* in_place;
    typename Device::Event updated;
    typename Device::Event gathered;
  };

  const ShardLayout* layout_;
  const std::vector<BucketTiles>* tiles_;
  Param* staging_;
  std::vector<Progress> buckets_;
  std::uint64_t capture_ = 0;       ///< that the last gather is part of
  mutable std::size_t joined_ = 0;  ///< buckets from the first on that were waited for outside captures
};

}  // namespace shardopt::inline v0::detail
