// SPDX-License-Identifier: Apache-2.0
/// An engine's two flat buffers on each GPU and a sharded optimizer, one host thread a GPU: ten steps.
#include <shardopt/cuda.cuh>

#include <cmath>
#include <cstdio>
#include <thread>
#include <vector>

namespace so = shardopt;

constexpr int count = 1000;

__global__ void backward(const float* w, float* gradient) {  // of the sum of (w - 3)²
  const int at = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (at < count) gradient[at] = 2 * (w[at] - 3);
}

float train(int rank, int ranks, ncclUniqueId id) {
  cudaSetDevice(rank);
  cudaStream_t stream, traffic;
  for (auto* each : {&stream, &traffic}) cudaStreamCreateWithFlags(each, cudaStreamNonBlocking);
  float *parameters, *gradients, result = 0;  // the engine's buffers
  for (auto* each : {&parameters, &gradients}) cudaMalloc(each, count * sizeof(float));
  cudaMemsetAsync(parameters, 0, count * sizeof(float), stream);
  {
    so::ParameterTable table;
    const so::ParameterId weight = table.add({.name = "weight", .shape = {count}, .offset = 0});
    using Optimizer = so::ZeroOptimizer<so::SGD, so::FlatSharding, so::Nccl, so::FullPrecision>;
    Optimizer optimizer(table, {.groups = {{"default", {.lr = 0.25}}}},
                        so::Nccl::create(id, rank, ranks, traffic), so::FlatBuffers{parameters, gradients},
                        stream);
    for (int step = 0; step < 10; ++step) {
      optimizer.wait_parameters(stream);
      backward<<<(count + 127) / 128, 128, 0, stream>>>(parameters, gradients);
      optimizer.gradient_ready(weight, stream);  // whole buckets travel from here on
      (void)optimizer.step({.gradient_scale = 1.0F / static_cast<float>(ranks)}, stream);
    }
    optimizer.wait_parameters(stream);
    cudaMemcpyAsync(&result, parameters + count - 1, sizeof(float), cudaMemcpyDeviceToHost, stream);
    cudaStreamSynchronize(stream);
  }
  for (float* each : {parameters, gradients}) cudaFree(each);
  for (cudaStream_t each : {stream, traffic}) cudaStreamDestroy(each);
  return result;
}

int main() {
  int gpus = 0;
  ncclUniqueId id;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || ncclGetUniqueId(&id) != ncclSuccess) return 1;
  std::vector<float> results(static_cast<std::size_t>(gpus));
  std::vector<std::thread> ranks;
  for (int r = 0; r < gpus; ++r) ranks.emplace_back([&, r] { results[r] = train(r, gpus, id); });
  for (std::thread& rank : ranks) rank.join();
  bool right = gpus > 0;  // each step halves the distance
  for (float w : results) right = right && std::fabs(w - 3 * (1 - 0x1p-10F)) < 1e-6F;
  return std::puts(right ? "right" : "WRONG"), right ? 0 : 1;
}
