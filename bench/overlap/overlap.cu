// SPDX-License-Identifier: Apache-2.0
// How much of an optimizer's communication is left beside a training loop's own work.
//
// overlap RANKS ELEMENTS LAYERS BUCKET_BYTES LAYER_BYTES ITERATIONS: one GPU a rank; each layer's forward and
// backward is a copy of LAYER_BYTES within the device. Prints milliseconds an iteration on rank 0, after one
// to warm up.

#include <shardopt/cuda.cuh>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <thread>
#include <vector>

namespace so = shardopt;

namespace {

struct Workload {
  int ranks;
  std::int64_t elements;
  int layers;
  std::int64_t bucket_bytes;
  std::int64_t layer_bytes;
  int iterations;
};

void require(cudaError_t status, const char* call) { so::throw_if_failed(status, call); }

/// Device memory that frees itself.
class Memory {
 public:
  explicit Memory(std::int64_t bytes) {
    require(cudaMalloc(&address_, static_cast<std::size_t>(bytes)), "cudaMalloc");
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { static_cast<void>(cudaFree(address_)); }
  template <class T>
  [[nodiscard]] T* as() const noexcept {
    return static_cast<T*>(address_);
  }

 private:
  void* address_ = nullptr;
};

/// @return milliseconds an iteration
float run_rank(const Workload& load, const ncclUniqueId& id, int rank) {
  require(cudaSetDevice(rank), "cudaSetDevice");
  cudaStream_t stream = nullptr;
  cudaStream_t comm_stream = nullptr;
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  require(cudaStreamCreateWithFlags(&comm_stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  require(cudaEventCreate(&begin), "cudaEventCreate");
  require(cudaEventCreate(&end), "cudaEventCreate");
  float milliseconds = 0;
  {
    const std::int64_t buffer_bytes = load.elements * static_cast<std::int64_t>(sizeof(float));
    const Memory parameters(buffer_bytes);
    const Memory gradients(buffer_bytes);
    const Memory work(2 * load.layer_bytes);
    require(cudaMemsetAsync(parameters.as<void>(), 0, static_cast<std::size_t>(buffer_bytes), stream),
            "cudaMemsetAsync");
    require(cudaMemsetAsync(gradients.as<void>(), 0, static_cast<std::size_t>(buffer_bytes), stream),
            "cudaMemsetAsync");
    require(cudaMemsetAsync(work.as<void>(), 0, static_cast<std::size_t>(2 * load.layer_bytes), stream),
            "cudaMemsetAsync");

    so::ParameterTable table;
    std::vector<so::ParameterId> layers;
    const std::int64_t numel = load.elements / load.layers;
    for (int layer = 0; layer < load.layers; ++layer) {
      layers.push_back(
          table.add({.name = "layer" + std::to_string(layer), .shape = {numel}, .offset = layer * numel}));
    }
    using Optimizer = so::ZeroOptimizer<so::AdamW, so::FlatSharding, so::Nccl, so::FullPrecision>;
    const Optimizer::Config config{.sharding = {.bucket_bytes = load.bucket_bytes},
                                   .max_norm = 1.0f,
                                   .initial_parameters = so::InitialParameters::trust};
    Optimizer optimizer(table, config, so::Nccl::create(id, rank, load.ranks, comm_stream),
                        so::FlatBuffers{parameters.as<float>(), gradients.as<float>()}, stream);
    const auto compute = [&] {
      require(cudaMemcpyAsync(work.as<std::byte>() + load.layer_bytes, work.as<std::byte>(),
                              static_cast<std::size_t>(load.layer_bytes), cudaMemcpyDeviceToDevice, stream),
              "cudaMemcpyAsync");
    };
    for (int iteration = 0; iteration <= load.iterations; ++iteration) {
      if (iteration == 1) require(cudaEventRecord(begin, stream), "cudaEventRecord");
      for (const so::ParameterId layer : layers) {
        optimizer.wait_parameters(layer, stream);
        compute();
      }
      for (auto layer = layers.rbegin(); layer != layers.rend(); ++layer) {
        compute();
        optimizer.gradient_ready(*layer, stream);
      }
      static_cast<void>(optimizer.step({.gradient_scale = 1.0f / static_cast<float>(load.ranks)}, stream));
    }
    require(cudaEventRecord(end, stream), "cudaEventRecord");
    require(cudaEventSynchronize(end), "cudaEventSynchronize");
    require(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
  }
  static_cast<void>(cudaEventDestroy(begin));
  static_cast<void>(cudaEventDestroy(end));
  static_cast<void>(cudaStreamDestroy(stream));
  static_cast<void>(cudaStreamDestroy(comm_stream));
  return milliseconds / static_cast<float>(load.iterations);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr, "usage: %s RANKS ELEMENTS LAYERS BUCKET_BYTES LAYER_BYTES ITERATIONS\n", argv[0]);
    return 2;
  }
  const Workload load{std::atoi(argv[1]),  std::atoll(argv[2]), std::atoi(argv[3]),
                      std::atoll(argv[4]), std::atoll(argv[5]), std::atoi(argv[6])};
  ncclUniqueId id;
  if (ncclGetUniqueId(&id) != ncclSuccess) return 1;
  std::vector<float> milliseconds(static_cast<std::size_t>(load.ranks), 0.0f);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < load.ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        milliseconds[static_cast<std::size_t>(rank)] = run_rank(load, id, rank);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        std::_Exit(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("%.4f\n", static_cast<double>(milliseconds[0]));
  return 0;
}
