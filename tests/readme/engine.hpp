// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What an engine would bring to the code in the documentation.

#include <shardopt/checkpoint.hpp>
#include <shardopt/shardopt.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace so = shardopt;

struct Tensor {
  std::string name;
  std::vector<std::int64_t> shape;
  std::size_t offset;
  float* w;
  float* dw;
};

#if defined(__CUDACC__)
struct Model {
  std::vector<Tensor> tensors;
  __nv_bfloat16* parameters;
  float* gradients;
  void forward_and_backward(int micro_batch, cudaStream_t stream,
                            const std::function<void(std::uint32_t)>& tensor_done);
};
float schedule(int step);
#endif

void train_step(int iteration);
std::string sampler_state();
void restore_sampler(const std::string& state);

namespace engine {

using Stream = so::Host::Stream;
using Optimizer = so::ZeroOptimizer<so::AdamW, so::FlatSharding, so::Threads<so::Host>, so::FullPrecision>;
struct Layer {
  std::vector<so::ParameterId> ids;
  void forward(Stream);
};
void* allocate(std::int64_t bytes);
void* allocate_pinned(std::int64_t bytes);
void backward(Stream, int micro_batch, const std::function<void(so::ParameterId)>& done = {});

}  // namespace engine

/// What statements in the documentation see.
#define STATEMENTS(name)                                                                               \
  void name([[maybe_unused]] std::vector<Tensor>& tensors, [[maybe_unused]] so::ParameterTable& table, \
            [[maybe_unused]] engine::Optimizer& optimizer,                                             \
            [[maybe_unused]] engine::Optimizer::Config& config,                                        \
            [[maybe_unused]] so::Threads<so::Host>& comm,                                              \
            [[maybe_unused]] std::vector<engine::Layer>& layers, [[maybe_unused]] float* parameters,   \
            [[maybe_unused]] float* gradients, [[maybe_unused]] float* exp_avg,                        \
            [[maybe_unused]] float* exp_avg_sq, [[maybe_unused]] so::StepOptions& options,             \
            [[maybe_unused]] engine::Stream stream, [[maybe_unused]] so::ParameterId weight,           \
            [[maybe_unused]] int rank, [[maybe_unused]] int world, [[maybe_unused]] int micro_batches)
