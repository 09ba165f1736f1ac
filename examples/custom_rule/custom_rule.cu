// SPDX-License-Identifier: Apache-2.0
/// A rule of the user's own, sharded over all GPUs with one host thread each.
#include "problem.hpp"
#include "signum.hpp"

#include <shardopt/cuda.cuh>

#include <nccl.h>

#include <cstdio>
#include <thread>
#include <vector>

namespace so = shardopt;

namespace {

/// Rank 0 alone has samples; the wire carries sums.
__global__ void backward(const float* w, float* gradient, int count, bool has_samples) {
  const int at = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (at < count) gradient[at] = has_samples ? 2 * (w[at] - (static_cast<float>(at % 7) - 3.0F)) : 0.0F;
}

std::vector<float> train(int rank, int ranks, const ncclUniqueId& id) {
  constexpr int count = static_cast<int>(elements);
  cudaSetDevice(rank);
  cudaStream_t stream = nullptr;
  cudaStream_t traffic = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  cudaStreamCreateWithFlags(&traffic, cudaStreamNonBlocking);
  float* parameters = nullptr;
  float* gradients = nullptr;
  cudaMalloc(reinterpret_cast<void**>(&parameters), count * sizeof(float));
  cudaMalloc(reinterpret_cast<void**>(&gradients), count * sizeof(float));
  cudaMemsetAsync(parameters, 0, count * sizeof(float), stream);
  std::vector<float> result(elements);
  {
    const so::ParameterTable table = parameter_table();
    const so::ParameterId weight{0};
    using Optimizer = so::ZeroOptimizer<Signum, so::FlatSharding, so::Nccl, so::FullPrecision>;
    Optimizer optimizer(table, {.groups = {{"default", {.lr = 0.125F, .beta = 0.5F}}}},
                        so::Nccl::create(id, rank, ranks, traffic), so::FlatBuffers{parameters, gradients},
                        stream);
    for (int step = 0; step < steps; ++step) {
      optimizer.wait_parameters(stream);
      backward<<<(count + 127) / 128, 128, 0, stream>>>(parameters, gradients, count, rank == 0);
      optimizer.gradient_ready(weight, stream);
      (void)optimizer.step({}, stream);
    }
    optimizer.wait_parameters(stream);
    cudaMemcpyAsync(result.data(), parameters, count * sizeof(float), cudaMemcpyDeviceToHost, stream);
    cudaStreamSynchronize(stream);
  }
  cudaFree(parameters);
  cudaFree(gradients);
  cudaStreamDestroy(stream);
  cudaStreamDestroy(traffic);
  return result;
}

}  // namespace

int main() {
  int gpus = 0;
  ncclUniqueId id;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0 || ncclGetUniqueId(&id) != ncclSuccess) {
    std::puts("no GPU answers, or NCCL does not");
    return 1;
  }
  std::vector<std::vector<float>> results(static_cast<std::size_t>(gpus));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < gpus; ++rank) {
    ranks.emplace_back([&, rank] { results[static_cast<std::size_t>(rank)] = train(rank, gpus, id); });
  }
  for (std::thread& thread : ranks) thread.join();
  return judge(results.back(), gpus);
}
