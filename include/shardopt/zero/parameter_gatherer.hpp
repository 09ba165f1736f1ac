// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/collective.hpp>
#include <shardopt/zero/bucket_buffers.hpp>
#include <shardopt/zero/shard_layout.hpp>

#include <cstdint>
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

  /// `stream` goes on when the parameters of a bucket have come.
  void wait(std::size_t index, Stream stream, const Device& device) const {
    device.wait_in_capture(stream, buckets_[index].gathered);
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
};

}  // namespace shardopt::inline v0::detail
