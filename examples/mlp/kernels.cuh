// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

namespace mlp::kernels {

/// Threads of a block; each thread works on one element.
inline constexpr int threads = 128;

__device__ inline float widen(float value) { return value; }
__device__ inline float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class T>
__device__ T narrow(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else {
    return __float2bfloat16_rn(value);
  }
}

/// This thread's element.
__device__ inline int element() { return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); }

/// Makes the images named by `order` the rows of `input`. 64 pixels an image.
template <class T>
__global__ void gather_images(const float* pixels, const std::int32_t* order, T* input, int count) {
  const int at = element();
  if (at < count) input[at] = narrow<T>(pixels[order[at / 64] * 64 + at % 64]);
}

/// out = ReLU(product + bias), one bias a column.
template <class T>
__global__ void add_bias_relu(const float* product, const T* bias, T* out, int columns, int count) {
  const int at = element();
  if (at < count) out[at] = narrow<T>(fmaxf(product[at] + widen(bias[at % columns]), 0.0F));
}

/// Softmax and cross-entropy of product + bias, one thread a sample: its loss, and the gradient of the loss
/// by the softmax's argument.
template <class T>
__global__ void softmax_cross_entropy(float* product, const T* bias, const std::int32_t* labels,
                                      const std::int32_t* order, T* delta, float* losses, int classes,
                                      int rows) {
  const int row = element();
  if (row >= rows) return;
  float* logits = product + row * classes;
  const int label = labels[order[row]];
  float largest = -INFINITY;
  for (int c = 0; c < classes; ++c) largest = fmaxf(largest, logits[c] += widen(bias[c]));
  const float right = logits[label] - largest;
  float sum = 0.0F;
  for (int c = 0; c < classes; ++c) sum += logits[c] = expf(logits[c] - largest);
  const float scale = 1.0F / sum;
  for (int c = 0; c < classes; ++c)
    delta[row * classes + c] = narrow<T>(logits[c] * scale - (c == label ? 1.0F : 0.0F));
  losses[row] = logf(sum) - right;
}

/// The sum of `count` losses, to twice a float's precision: `sum[0] + sum[1]`. One thread.
__global__ inline void sum_losses(const float* losses, float* sum, int count) {
  if (element() != 0) return;
  double total = 0;
  for (int at = 0; at < count; ++at) total += losses[at];
  sum[0] = static_cast<float>(total);
  sum[1] = static_cast<float>(total - sum[0]);
}

/// The largest of product + bias, one thread a sample.
template <class T>
__global__ void most_likely_class(const float* product, const T* bias, std::int32_t* classes_out, int classes,
                                  int rows) {
  const int row = element();
  if (row >= rows) return;
  float largest = -INFINITY;
  for (int c = 0; c < classes; ++c) {
    const float logit = product[row * classes + c] + widen(bias[c]);
    if (logit > largest) {
      largest = logit;
      classes_out[row] = c;
    }
  }
}

/// Passes the gradient through ReLU: where the layer gave 0, nothing comes through.
template <class T>
__global__ void relu_gradient(const float* product, const T* out, T* delta, int count) {
  const int at = element();
  if (at < count) delta[at] = widen(out[at]) > 0.0F ? narrow<T>(product[at]) : narrow<T>(0.0F);
}

/// Adds one micro-batch's gradient of a layer to the gradient buffer, each element once: the weights' from
/// `product`, and the biases' as the sums of delta's columns, in order of rows.
template <class T, class Grad>
__global__ void accumulate(const float* product, Grad* weight, int weights, const T* delta, Grad* bias,
                           int columns, int rows) {
  const int at = element();
  if (at < weights) {
    weight[at] = narrow<Grad>(widen(weight[at]) + product[at]);
  } else if (at < weights + columns) {
    const int column = at - weights;
    float sum = 0.0F;
    for (int row = 0; row < rows; ++row) sum += widen(delta[row * columns + column]);
    bias[column] = narrow<Grad>(widen(bias[column]) + sum);
  }
}

}  // namespace mlp::kernels
