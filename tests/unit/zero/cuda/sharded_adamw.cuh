// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/cuda.cuh>
#include <support/cuda_calls.hpp>
#include <support/cuda_ranks.hpp>
#include <support/message_of.hpp>
#include <support/require_devices.hpp>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace test {

namespace so = shardopt;

/// The optimizer of these tests, compiled in sharded_adamw.cu.
using Sharded = so::ZeroOptimizer<so::AdamW, so::FlatSharding, so::Nccl, so::FullPrecision>;

/// One rank of an engine: a table of three parameters with a gap, its flat buffers, two streams.
class Rank {
 public:
  explicit Rank(std::int64_t scale = 1)
      : Rank(std::vector<std::int64_t>{700 * scale, 1, 1300 * scale + 11}) {}

  explicit Rank(const std::vector<std::int64_t>& sizes)
      : extent_(lay_out(sizes)),
        parameters(static_cast<std::size_t>(extent_)),
        gradients(static_cast<std::size_t>(extent_)) {
    fill(gradients, 1.0f);
    fill(parameters, 0.5f);
  }

  [[nodiscard]] so::FlatBuffers<float, float> buffers() const {
    return {parameters.data(), gradients.data()};
  }

  /// Small buckets, so that there are several.
  [[nodiscard]] static Sharded::Config config() {
    return {.groups = {{"default", {.lr = 0.01}}}, .sharding = {.bucket_bytes = 2048}, .max_norm = 10.0f};
  }

  [[nodiscard]] std::unique_ptr<Sharded> optimizer(ncclComm_t comm, Sharded::Memory memory = {}) const {
    return optimizer(config(), comm, std::move(memory));
  }
  [[nodiscard]] std::unique_ptr<Sharded> optimizer(const Sharded::Config& with, ncclComm_t comm,
                                                   Sharded::Memory memory = {}) const {
    return std::make_unique<Sharded>(table, with, so::Nccl::borrow(comm, communication), buffers(),
                                     std::move(memory), compute);
  }

  /// value · (1 + k mod 5) for each element k, on the compute stream.
  void fill(const OwnMemory<float>& buffer, float value) const {
    std::vector<float> values(static_cast<std::size_t>(extent_));
    for (std::size_t k = 0; k < values.size(); ++k) values[k] = value * static_cast<float>(1 + k % 5);
    buffer.write(values, compute);
  }

  [[nodiscard]] std::vector<float> read_parameters() const { return parameters.read(compute); }

 private:
  std::int64_t lay_out(const std::vector<std::int64_t>& sizes) {
    std::int64_t at = 0;
    for (const std::int64_t size : sizes) {
      ids.push_back(table.add(
          {.name = std::string("p").append(std::to_string(ids.size())), .shape = {size}, .offset = at}));
      at += size + (ids.size() == 1 ? 3 : 0);
    }
    return at;
  }

 public:
  so::ParameterTable table;
  std::vector<so::ParameterId> ids;
  OwnStream compute;
  OwnStream communication;

 private:
  std::int64_t extent_;

 public:
  OwnMemory<float> parameters;
  OwnMemory<float> gradients;
};

/// Meets the other ranks' threads.
class Meeting {
 public:
  explicit Meeting(int world) : world_(world) {}
  void operator()() {
    std::unique_lock lock(mutex_);
    const std::int64_t mine = generation_;
    if (++waiting_ == world_) {
      waiting_ = 0;
      ++generation_;
      changed_.notify_all();
      return;
    }
    changed_.wait(lock, [&] { return generation_ != mine; });
  }

 private:
  int world_;
  int waiting_ = 0;
  std::int64_t generation_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace test

extern template class shardopt::ZeroOptimizer<shardopt::AdamW, shardopt::FlatSharding, shardopt::Nccl,
                                              shardopt::FullPrecision>;
