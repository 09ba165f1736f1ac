// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/collective.hpp>
#include <shardopt/core/parameter_table.hpp>
#include <shardopt/zero/host_wait.hpp>
#include <shardopt/zero/shard_layout.hpp>
#include <shardopt/zero/state_run.hpp>

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <vector>

namespace shardopt::inline v0::detail {

/// Device memory for the time of a call. Left to the process if a device may use it for ever.
template <Collective Comm>
class TemporaryMemory {
 public:
  TemporaryMemory(const Comm& comm, std::int64_t bytes)
      : comm_(comm), memory_(bytes > 0 ? comm.device().allocate(bytes) : nullptr) {}
  TemporaryMemory(const TemporaryMemory&) = delete;
  TemporaryMemory& operator=(const TemporaryMemory&) = delete;
  ~TemporaryMemory() {
    if (memory_ != nullptr && !is_stuck(comm_)) comm_.device().deallocate(memory_);
  }
  [[nodiscard]] float* get() const noexcept { return static_cast<float*>(memory_); }

 private:
  const Comm& comm_;
  void* memory_;
};

/// Brings one sharded state to one rank, bucket by bucket.
///
/// A rank's part of a bucket is contiguous in its state buffer, in block order: one copy, then an all-gather
/// of the bucket in a staging buffer. Collective; waits.
/// @param base  this rank's state buffer  @param into  of each table entry, on the root; unused elsewhere
template <Collective Comm>
void gather_sharded_state(Comm& comm, const ShardLayout& layout, const ParameterTable& table,
                          const float* base, int root, std::vector<FullState*>& into) {
  const auto& device = comm.device();
  std::int64_t largest = 0;
  for (const Bucket& bucket : layout.buckets()) largest = (std::max)(largest, bucket.flat.size());
  const TemporaryMemory<Comm> staging(comm, largest * static_cast<std::int64_t>(sizeof(float)));
  std::vector<float> whole(static_cast<std::size_t>(comm.rank() == root ? largest : 0));
  for (const Bucket& bucket : layout.buckets()) {
    const Range own = bucket.blocks().block(layout.rank());
    device.copy(staging.get() + own.begin, base + bucket.state,
                own.size() * static_cast<std::int64_t>(sizeof(float)), comm.stream());
    comm.all_gather(staging.get(), bucket.blocks(), Dtype::fp32);
    if (comm.rank() != root) continue;
    wait_for(comm, comm.stream());
    device.download(whole.data(), staging.get(),
                    bucket.flat.size() * static_cast<std::int64_t>(sizeof(float)), comm.stream());
    for (const Segment& segment : bucket.segments) {
      std::copy_n(whole.begin() + segment.block, segment.flat.size(),
                  into[segment.entry]->values.begin() +
                      (segment.flat.begin - table.entries()[segment.entry].flat.begin));
    }
  }
  wait_for(comm, comm.stream());  // the staging goes
}

}  // namespace shardopt::inline v0::detail
