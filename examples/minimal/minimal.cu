// SPDX-License-Identifier: Apache-2.0
/// An engine's two flat buffers on each GPU and a sharded optimizer, one host thread a GPU: ten steps towards
/// w = 3.
#include <shardopt/cuda.cuh>

#include <cmath>
#include <cstdio>
#include <thread>
#include <vector>

namespace so = shardopt;

/// The gradient of the sum of (w - 3)².
__global__ void backward(const float* w, float* gradient, int count) {
  const int at = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (at < count) gradient[at] = 2 * (w[at] - 3);
}

float train(int rank, int ranks, ncclComm_t comm) {
  constexpr int count = 1000;
  cudaSetDevice(rank);
  cudaStream_t stream, traffic;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  cudaStreamCreateWithFlags(&traffic, cudaStreamNonBlocking);
  float *parameters, *gradients, result = 0;  // the engine's buffers
  cudaMalloc(&parameters, count * sizeof(float));
  cudaMalloc(&gradients, count * sizeof(float));
  cudaMemsetAsync(parameters, 0, count * sizeof(float), stream);
  {
    so::ParameterTable table;
    const so::ParameterId weight = table.add({.name = "weight", .shape = {count}, .offset = 0});
    using Optimizer = so::ZeroOptimizer<so::SGD, so::FlatSharding, so::Nccl, so::Mixed<float, float, float>>;
    Optimizer optimizer(table, {.groups = {{"default", {.lr = 0.25}}}}, so::Nccl::borrow(comm, traffic),
                        so::FlatBuffers{parameters, gradients}, stream);
    for (int step = 0; step < 10; ++step) {
      optimizer.wait_parameters(stream);
      backward<<<(count + 127) / 128, 128, 0, stream>>>(parameters, gradients, count);
      optimizer.gradient_ready(weight, stream);  // whole buckets travel from here on
      (void)optimizer.step({.gradient_scale = 1.0F / static_cast<float>(ranks)}, stream);
    }
    optimizer.wait_parameters(stream);
    cudaMemcpyAsync(&result, parameters + count - 1, sizeof(float), cudaMemcpyDeviceToHost, stream);
    cudaStreamSynchronize(stream);
  }
  for (float* buffer : {parameters, gradients}) cudaFree(buffer);
  for (cudaStream_t each : {stream, traffic}) cudaStreamDestroy(each);
  return result;
}

int main() {
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) return std::puts("no GPU answers"), 1;
  std::vector<ncclComm_t> comms(gpus);
  ncclCommInitAll(comms.data(), gpus, nullptr);
  std::vector<float> results(gpus);
  std::vector<std::thread> ranks;
  for (int r = 0; r < gpus; ++r) ranks.emplace_back([&, r] { results[r] = train(r, gpus, comms[r]); });
  for (std::thread& rank : ranks) rank.join();
  for (ncclComm_t comm : comms) ncclCommDestroy(comm);
  bool right = true;  // each step halves the distance
  for (float w : results) right = right && std::fabs(w - 3 * (1 - 0x1p-10F)) < 1e-6F;
  return std::puts(right ? "right" : "WRONG"), right ? 0 : 1;
}
