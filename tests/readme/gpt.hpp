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

/// A tensor of all layers, one after another, or of none.
struct Stacked {
  std::string name;
  std::size_t offset;
  std::size_t size;  ///< of one layer
  bool per_layer;
  std::string group;
};

struct Gpt {
  int layers;
  std::vector<Stacked> tensors;
  __nv_bfloat16* params;
  __nv_bfloat16* grads;
  float* m;
  float* v;
  float* master;
  float* mean_loss;  ///< device memory
  void forward(int layer, cudaStream_t stream);
  void backward(int layer, cudaStream_t stream);
  float schedule(int step) const;
  bool is_outlier(double norm, double loss) const;
};
