// SPDX-License-Identifier: Apache-2.0
#include <shardopt/collectives/threads.cuh>

#include <support/cuda_ranks.hpp>
#include <support/require_devices.hpp>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

namespace so = shardopt;
using namespace test;

namespace {

using CudaThreads = so::Threads<so::Cuda>;

/// Where the ranks sit: GPUs of their own, shared ones, both.
std::vector<int> some_seats() {
  require_peers(4);
  return GENERATE(values<std::vector<int>>({{0, 1}, {0, 1, 0}, {0, 0, 1, 1}, {3, 2, 1, 0}}));
}

/// Runs body(rank's collective) on a thread a rank, another GPU current than the rank's; every second rank
/// brings a stream of its own.
template <class Body>
void on_seats(const std::vector<int>& devices, const Body& body) {
  std::vector<std::optional<OwnStream>> streams(devices.size());
  std::vector<so::ThreadSeat> seats;
  for (std::size_t rank = 0; rank < devices.size(); ++rank) {
    succeed(cudaSetDevice(devices[rank]));
    if (rank % 2 == 1) streams[rank].emplace();
    seats.push_back({devices[rank], rank % 2 == 1 ? static_cast<cudaStream_t>(*streams[rank]) : nullptr});
  }
  succeed(cudaSetDevice(0));
  std::vector<CudaThreads> comms = CudaThreads::make(seats);
  on_ranks(static_cast<int>(devices.size()), [&](int rank) {
    const int device = devices[static_cast<std::size_t>(rank)];
    CudaThreads comm = std::move(comms[static_cast<std::size_t>(rank)]);
    if (comm.rank() != rank || comm.device().ordinal() != device) throw std::runtime_error("another seat");
    succeed(cudaSetDevice(device == 0 ? 1 : 0));
    body(std::move(comm));
  });
}

/// Memory of a rank's GPU that holds these values.
template <class T>
class Held {
 public:
  Held(const CudaThreads& comm, const std::vector<T>& values) : stream_(comm.stream()) {
    const so::CudaDeviceGuard guard(comm.device().ordinal());
    memory_.emplace(values.size());
    memory_->write(values, stream_);
  }
  [[nodiscard]] T* data() const noexcept { return memory_->data(); }
  [[nodiscard]] std::vector<T> read() const { return memory_->read(stream_); }

 private:
  cudaStream_t stream_;
  std::optional<OwnMemory<T>> memory_;
};

/// Block borders of a world: unequal, one of them empty.
std::vector<std::int64_t> borders_of(std::size_t world) {
  std::vector<std::int64_t> borders{0};
  for (std::size_t rank = 0; rank < world; ++rank)
    borders.push_back(borders.back() + (rank == 1 ? 0 : 500 * static_cast<std::int64_t>(rank) + 13));
  return borders;
}

}  // namespace

TEMPLATE_TEST_CASE("Threads on several GPUs sum each block onto its rank and leave the others' alone",
                   "[collectives][cuda][B069]", float, so::bf16, so::fp16) {
  const std::vector<int> devices = some_seats();
  const auto world = static_cast<int>(devices.size());
  CAPTURE(devices);
  const std::vector<std::int64_t> borders = borders_of(devices.size());
  const auto element = [](int rank, std::int64_t i) {
    return so::from_float<TestType>(static_cast<float>((rank + 1) * (i % 7)));
  };
  std::vector<std::vector<TestType>> got(devices.size());
  on_seats(devices, [&](CudaThreads comm) {
    std::vector<TestType> values;
    for (std::int64_t i = 0; i < borders.back(); ++i) values.push_back(element(comm.rank(), i));
    const Held<TestType> held(comm, values);
    comm.reduce_scatter(held.data(), {borders}, so::dtype_of<TestType>, so::Reduction::ordered, nullptr);
    got[static_cast<std::size_t>(comm.rank())] = held.read();
  });
  for (int rank = 0; rank < world; ++rank) {
    const so::Range own = so::BlockLayout{borders}.block(rank);
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < borders.back(); ++i) {
      const float sum = static_cast<float>(world * (world + 1) / 2 * (i % 7));
      const TestType expected = own.contains(i) ? so::from_float<TestType>(sum) : element(rank, i);
      const TestType is = got[static_cast<std::size_t>(rank)][static_cast<std::size_t>(i)];
      wrong += so::to_float(is) != so::to_float(expected) ? 1 : 0;
    }
    CAPTURE(rank);
    CHECK(wrong == 0);
  }
}

TEST_CASE("Threads on several GPUs gather blocks, sum words, broadcast bytes and exchange the host's",
          "[collectives][cuda][B069]") {
  const std::vector<int> devices = some_seats();
  const auto world = static_cast<std::int64_t>(devices.size());
  CAPTURE(devices);
  constexpr std::size_t words = 128;  // the most
  const std::vector<std::int64_t> borders = borders_of(devices.size());
  struct Seen {
    std::vector<float> gathered;
    std::vector<std::int64_t> summed;
    std::vector<std::int64_t> told;
    std::vector<std::int64_t> all;
  };
  std::vector<Seen> seen(devices.size());
  on_seats(devices, [&](CudaThreads comm) {
    const std::int64_t rank = comm.rank();
    const so::Range own = so::BlockLayout{borders}.block(comm.rank());
    std::vector<float> blocks(static_cast<std::size_t>(borders.back()), -1.0f);
    for (std::int64_t i = own.begin; i < own.end; ++i)
      blocks[static_cast<std::size_t>(i)] = static_cast<float>(i);
    const Held<float> held(comm, blocks);
    std::vector<std::int64_t> mine(words, rank + 1);
    mine[0] = rank == 0 ? INT64_MAX : 1;
    const Held<std::int64_t> sums(comm, mine);
    const Held<std::int64_t> told(comm, std::vector<std::int64_t>(3, 100 * rank));
    Seen& result = seen[static_cast<std::size_t>(rank)];
    result.all.resize(devices.size());
    comm.all_gather(held.data(), {borders}, so::Dtype::fp32);
    comm.all_reduce(sums.data(), words);
    comm.broadcast(told.data(), 3 * sizeof(std::int64_t), 1);
    comm.exchange(std::as_bytes(std::span(&rank, 1)), std::as_writable_bytes(std::span(result.all)), nullptr);
    result.gathered = held.read();
    result.summed = sums.read();
    result.told = told.read();
  });
  std::vector<float> gathered;
  for (std::int64_t i = 0; i < borders.back(); ++i) gathered.push_back(static_cast<float>(i));
  std::vector<std::int64_t> summed(words, world * (world + 1) / 2);
  summed[0] = INT64_MIN + (world - 2);
  std::vector<std::int64_t> all;
  for (std::int64_t rank = 0; rank < world; ++rank) all.push_back(rank);
  for (const Seen& rank : seen) {
    CHECK(rank.gathered == gathered);
    CHECK(rank.summed == summed);
    CHECK(rank.told == std::vector<std::int64_t>(3, 100));
    CHECK(rank.all == all);
  }
}
