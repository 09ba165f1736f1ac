// SPDX-License-Identifier: Apache-2.0
// dropped_wait [N]: two ranks train; rank 0's device forgets its N-th wait for an event. A launcher that
// looks for unordered accesses must report that (dropped_waits.py asks for each N). Without N: prints how
// many waits there are.

#include <shardopt/cuda.cuh>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <span>
#include <thread>
#include <utility>
#include <vector>

namespace so = shardopt;

namespace {

constexpr std::int64_t elements = 7000;

/// Counts waits and drops one.
struct Waits {
  int count = 0;
  int dropped = -1;
};

/// A device that forgets. All else is Cuda's.
class ForgetfulCuda : public so::Cuda {
 public:
  ForgetfulCuda(const so::Cuda& device, Waits* waits) : Cuda(device), waits_(waits) {}
  void wait(Stream stream, const Event& event) const {
    if (waits_->count++ != waits_->dropped) Cuda::wait(stream, event);
  }
  void wait_in_capture(Stream stream, const Event& event) const {
    if (capture_of(event) == capture_of(stream)) wait(stream, event);
  }

 private:
  Waits* waits_;
};

/// Nccl on such a device.
class ForgetfulNccl {
 public:
  using Device = ForgetfulCuda;
  static constexpr std::string_view name = so::Nccl::name;

  ForgetfulNccl(so::Nccl nccl, Waits* waits) : nccl_(std::move(nccl)), device_(nccl_.device(), waits) {}
  [[nodiscard]] int rank() const noexcept { return nccl_.rank(); }
  [[nodiscard]] int world() const noexcept { return nccl_.world(); }
  [[nodiscard]] cudaStream_t stream() const noexcept { return nccl_.stream(); }
  [[nodiscard]] const ForgetfulCuda& device() const noexcept { return device_; }
  [[nodiscard]] static bool supports(so::Reduction reduction, so::Dtype type) {
    return so::Nccl::supports(reduction, type);
  }
  [[nodiscard]] static so::Reduction automatic_reduction(so::Dtype type) {
    return so::Nccl::automatic_reduction(type);
  }
  [[nodiscard]] static std::int64_t workspace_bytes(so::Reduction reduction, so::BlockLayout blocks,
                                                    so::Dtype type, int rank) {
    return so::Nccl::workspace_bytes(reduction, blocks, type, rank);
  }
  void reduce_scatter(void* base, so::BlockLayout blocks, so::Dtype type, so::Reduction reduction,
                      void* workspace) {
    nccl_.reduce_scatter(base, blocks, type, reduction, workspace);
  }
  void all_gather(void* base, so::BlockLayout blocks, so::Dtype type) {
    nccl_.all_gather(base, blocks, type);
  }
  void all_reduce(std::int64_t* values, std::int64_t count) { nccl_.all_reduce(values, count); }
  void broadcast(void* data, std::int64_t bytes, int root) { nccl_.broadcast(data, bytes, root); }
  void exchange(std::span<const std::byte> mine, std::span<std::byte> all, void* scratch) {
    nccl_.exchange(mine, all, scratch);
  }

 private:
  so::Nccl nccl_;
  ForgetfulCuda device_;
};
static_assert(so::Collective<ForgetfulNccl>);

void require(cudaError_t status) { so::throw_if_failed(status, "the engine's own call"); }

/// Layers' gradients come from two streams, parameters are read on a third. After a discarded step a gradient
/// is written behind its reduction alone.
void train(const ncclUniqueId& id, int rank, Waits& waits) {
  require(cudaSetDevice(rank));
  cudaStream_t streams[5];
  for (cudaStream_t& stream : streams) require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const auto [stream, second, idle, reader, comm_stream] = streams;
  float* parameters = nullptr;
  float* gradients = nullptr;
  float* copy = nullptr;
  require(cudaMalloc(&parameters, elements * sizeof(float)));
  require(cudaMalloc(&gradients, elements * sizeof(float)));
  require(cudaMalloc(&copy, elements * sizeof(float)));
  cudaEvent_t begun = nullptr;
  cudaEvent_t reduced = nullptr;
  require(cudaEventCreateWithFlags(&begun, cudaEventDisableTiming));
  require(cudaEventCreateWithFlags(&reduced, cudaEventDisableTiming));
  require(cudaMemsetAsync(parameters, 0, elements * sizeof(float), stream));
  require(cudaMemsetAsync(gradients, 0, elements * sizeof(float), stream));
  {
    so::ParameterTable table;
    const so::ParameterId first = table.add({.name = "first", .shape = {3000}, .offset = 0});
    const so::ParameterId last = table.add({.name = "last", .shape = {3000}, .offset = 3000});
    const so::ParameterId early = table.add({.name = "early", .shape = {1000}, .offset = 6000});
    using Optimizer = so::ZeroOptimizer<so::AdamW, so::FlatSharding, ForgetfulNccl, so::FullPrecision>;
    Optimizer optimizer(table, {.sharding = {.bucket_bytes = 12288}},
                        ForgetfulNccl(so::Nccl::create(id, rank, 2, comm_stream), &waits),
                        so::FlatBuffers{parameters, gradients}, stream);
    for (int step = 0; step < 3; ++step) {
      if (step == 2) {
        require(cudaMemsetAsync(gradients + 6000, 3, 1000 * sizeof(float), idle));
        optimizer.gradient_ready(early, idle);
      }
      require(cudaEventRecord(begun, stream));
      require(cudaStreamWaitEvent(second, begun, 0));
      require(cudaMemsetAsync(gradients + 3000, 1 + step, 3000 * sizeof(float), second));
      optimizer.gradient_ready(last, second);
      require(cudaMemsetAsync(gradients, 2 + step, 3000 * sizeof(float), stream));
      optimizer.gradient_ready(first, stream);
      if (step == 1) {
        static_cast<void>(optimizer.reduce({}, stream));
        require(cudaEventRecord(reduced, comm_stream));
        require(cudaStreamWaitEvent(idle, reduced, 0));
        static_cast<void>(optimizer.discard(stream));
      } else {
        static_cast<void>(optimizer.step({}, stream));
      }
      if (step != 1) optimizer.wait_parameters(reader);  // a discarded step changes none
      require(cudaMemcpyAsync(copy, parameters, elements * sizeof(float), cudaMemcpyDeviceToDevice, reader));
      // The engine's own order: parameters are written again only behind their readers, gradients behind
      // their zeroing.
      require(cudaEventRecord(begun, reader));
      require(cudaStreamWaitEvent(stream, begun, 0));
      if (step != 1) optimizer.zero_gradients(second);
      require(cudaEventRecord(begun, second));
      require(cudaStreamWaitEvent(stream, begun, 0));
    }
  }
  require(cudaDeviceSynchronize());
  require(cudaEventDestroy(begun));
  require(cudaEventDestroy(reduced));
  require(cudaFree(parameters));
  require(cudaFree(gradients));
  require(cudaFree(copy));
  for (cudaStream_t each : streams) require(cudaStreamDestroy(each));
}

}  // namespace

int main(int argc, char** argv) {
  Waits waits[2];
  if (argc > 1) waits[0].dropped = std::atoi(argv[1]);
  ncclUniqueId id;
  if (ncclGetUniqueId(&id) != ncclSuccess) return 1;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        train(id, rank, waits[rank]);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        std::_Exit(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("%d\n", waits[0].count);
  return 0;
}
