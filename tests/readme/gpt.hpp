// SPDX-License-Identifier: Apache-2.0
#pragma once

/// @file
/// What an engine like llm.c would bring to the code in the documentation.

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

struct Named {
  std::string name;
  std::vector<std::int64_t> shape;
  std::size_t offset;
  std::string group;
};

struct Gpt {
  /// In the order of the forward pass: embeddings; each layer's tensors, out of the stacks; the last norm.
  std::vector<std::vector<Named>> parts;
  __nv_bfloat16* params;
  __nv_bfloat16* grads;
  float* m;
  float* v;
  float* master;
  float* mean_loss;  ///< device memory
  void forward(std::size_t part, cudaStream_t stream);
  void backward(std::size_t part, cudaStream_t stream);  ///< of part 0 last: then the tied embedding is done
  float schedule(int step) const;
  bool is_outlier(double norm, double loss) const;
};
