// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "block.hpp"
#include "cuda_resources.cuh"
#include "digits.hpp"
#include "kernels.cuh"
#include "layout.hpp"
#include "loss_sum.hpp"

#include <shardopt/cuda.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

namespace mlp {

/// The network on one GPU: products by cuBLAS with fp32 sums, the rest by own kernels, all in one stream.
/// What is stored in bf16 is also multiplied in bf16. Its results are a function of the weights and the block
/// of samples alone.
template <class Param, class Grad>
class CudaNetwork {
  template <class T>
  using Native = std::conditional_t<std::is_same_v<T, float>, float, __nv_bfloat16>;
  using Value = Native<Param>;  ///< of parameters, activations and deltas

 public:
  static constexpr const char* device_name = "device";

  /// @pre the rank's device is current
  CudaNetwork(const Layout& layout, const Digits& digits, int largest_block)
      : layout_(layout),
        blas_(stream_.get()),
        parameters_(layout.size()),
        gradients_(layout.size()),
        order_(digits.train.labels.size()),
        losses_(digits.train.labels.size()),
        loss_sum_(2),
        predictions_(digits.train.labels.size()) {
    samples_.emplace_back(digits.train, stream_.get());
    samples_.emplace_back(digits.test, stream_.get());
    const auto rows = static_cast<std::size_t>(largest_block);
    activations_.emplace_back(rows * static_cast<std::size_t>(layout[0].inputs));
    std::size_t product = 0;
    for (const Layer& layer : layout.layers) {
      const std::size_t outputs = rows * static_cast<std::size_t>(layer.outputs);
      activations_.emplace_back(outputs);
      deltas_.emplace_back(outputs);
      product = std::max({product, outputs, static_cast<std::size_t>(layer.weights())});
    }
    product_ = DeviceArray<float>(product);
  }

  /// Bytes in use on the current device, by whomever.
  static std::int64_t memory_in_use() {
    std::size_t left = 0;
    std::size_t total = 0;
    check(cudaMemGetInfo(&left, &total), "cudaMemGetInfo");
    return static_cast<std::int64_t>(total - left);
  }

  [[nodiscard]] Param* parameters() { return reinterpret_cast<Param*>(parameters_.data()); }
  [[nodiscard]] Grad* gradients() { return reinterpret_cast<Grad*>(gradients_.data()); }
  [[nodiscard]] cudaStream_t stream() const { return stream_.get(); }

  /// Sets all parameters, rounded to their type, and clears the gradients.
  void initialize(const std::vector<float>& flat) {
    std::vector<Param> rounded(flat.size());
    std::transform(flat.begin(), flat.end(), rounded.begin(), shardopt::from_float<Param>);
    parameters_.upload(rounded, stream());
    check(cudaMemsetAsync(gradients_.data(), 0, gradients_.bytes(), stream()), "cudaMemsetAsync");
  }

  /// A copy of the flat parameter buffer; waits for the stream.
  [[nodiscard]] auto download() const { return parameters_.download(parameters_.size(), stream()); }

  /// Names the samples that blocks are taken from, and their order.
  void use(const Samples& samples, const std::vector<std::int32_t>& order) {
    used_ = samples_[0].source == &samples ? &samples_[0] : &samples_[1];
    count_ = order.size();
    check(cudaMemcpyAsync(order_.data(), order.data(), order.size() * sizeof(order[0]),
                          cudaMemcpyHostToDevice, stream()),
          "cudaMemcpyAsync");
  }

  /// Makes a block the input of the first layer.
  void load(Block block) {
    block_ = block;
    const int count = block.count * Samples::pixels_per_image;
    launch(kernels::gather_images<Value>, count, used_->pixels.data(), order(), activations_[0].data(),
           count);
  }

  /// Computes a layer's output: ReLU(x Wᵀ + b). Of the last layer it leaves the product alone, for loss() or
  /// predict().
  void forward(int at) {
    const Layer& layer = layout_[at];
    multiply(CUBLAS_OP_T, CUBLAS_OP_N, layer.outputs, block_.count, layer.inputs, weights(at), layer.inputs,
             activations_[index(at)].data(), layer.inputs, layer.outputs);
    if (at + 1 == layout_.depth()) return;
    const int count = block_.count * layer.outputs;
    launch(kernels::add_bias_relu<Value>, count, product(), bias(at), activations_[index(at) + 1].data(),
           layer.outputs, count);
  }

  /// Softmax and cross-entropy of the last layer's output: notes each sample's loss and the gradient of their
  /// sum.
  void loss() {
    const int last = layout_.depth() - 1;
    launch(kernels::softmax_cross_entropy<Value>, block_.count, product(), bias(last), used_->labels.data(),
           order(), deltas_.back().data(), losses_.data() + block_.first, layout_[last].outputs,
           block_.count);
  }

  /// Adds the block's gradient of a layer, computed apart, to the gradient buffer, and passes the rest down.
  void backward(int at) {
    const Layer& layer = layout_[at];
    const Value* delta = deltas_[index(at)].data();
    const Value* in = activations_[index(at)].data();
    multiply(CUBLAS_OP_N, CUBLAS_OP_T, layer.inputs, layer.outputs, block_.count, in, layer.inputs, delta,
             layer.outputs, layer.inputs);
    const int weights_count = static_cast<int>(layer.weights());
    launch(kernels::accumulate<Value, Native<Grad>>, weights_count + layer.outputs, product(),
           gradients_.data() + layer.weight, weights_count, delta, gradients_.data() + layer.bias,
           layer.outputs, block_.count);
    if (at == 0) return;
    multiply(CUBLAS_OP_N, CUBLAS_OP_N, layer.inputs, block_.count, layer.outputs, weights(at), layer.inputs,
             delta, layer.outputs, layer.inputs);
    const int count = block_.count * layer.inputs;
    launch(kernels::relu_gradient<Value>, count, product(), in, deltas_[index(at) - 1].data(), count);
  }

  /// Notes the most likely class of each sample of the block.
  void predict() {
    const int last = layout_.depth() - 1;
    launch(kernels::most_likely_class<Value>, block_.count, product(), bias(last),
           predictions_.data() + block_.first, layout_[last].outputs, block_.count);
  }

  /// Sums the losses that loss() noted for a run of samples. @return where the sum will stand, in two parts
  LossSum sum_losses(Block block) {
    launch(kernels::sum_losses, 1, losses_.data() + block.first, loss_sum_.data(), block.count);
    return {loss_sum_.data(), loss_sum_.data() + 1};
  }

  /// The classes noted since use(), in its order; waits for the stream.
  [[nodiscard]] std::vector<std::int32_t> predictions() const {
    return predictions_.download(count_, stream());
  }

 private:
  /// Samples on the device.
  struct DeviceSamples {
    const Samples* source;
    DeviceArray<float> pixels;
    DeviceArray<std::int32_t> labels;

    DeviceSamples(const Samples& samples, cudaStream_t stream)
        : source(&samples), pixels(samples.pixels.size()), labels(samples.labels.size()) {
      pixels.upload(samples.pixels, stream);
      labels.upload(samples.labels, stream);
    }
  };

  static std::size_t index(int value) { return static_cast<std::size_t>(value); }
  [[nodiscard]] float* product() const { return product_.data(); }
  [[nodiscard]] const std::int32_t* order() const { return order_.data() + block_.first; }
  [[nodiscard]] const Value* weights(int at) const { return parameters_.data() + layout_[at].weight; }
  [[nodiscard]] const Value* bias(int at) const { return parameters_.data() + layout_[at].bias; }

  /// product = op(a) op(b), column by column: `rows` × `columns`, sums over `inner`.
  void multiply(cublasOperation_t op_a, cublasOperation_t op_b, int rows, int columns, int inner,
                const Value* a, int lda, const Value* b, int ldb, int ldc) {
    constexpr cudaDataType type = std::is_same_v<Value, float> ? CUDA_R_32F : CUDA_R_16BF;
    const float one = 1.0F;
    const float zero = 0.0F;
    check(cublasGemmEx(blas_.get(), op_a, op_b, rows, columns, inner, &one, a, type, lda, b, type, ldb, &zero,
                       product(), CUDA_R_32F, ldc, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
          "cublasGemmEx");
  }

  template <class Kernel, class... Arguments>
  void launch(Kernel kernel, int count, Arguments... arguments) {
    kernel<<<(count + kernels::threads - 1) / kernels::threads, kernels::threads, 0, stream()>>>(
        arguments...);
    check(cudaGetLastError(), "kernel launch");
  }

  const Layout& layout_;
  Stream stream_;
  Blas blas_;
  DeviceArray<Value> parameters_;
  DeviceArray<Native<Grad>> gradients_;
  std::vector<DeviceSamples> samples_;           ///< for training and for the test
  std::vector<DeviceArray<Value>> activations_;  ///< of the input and of each hidden layer: rows × width
  std::vector<DeviceArray<Value>> deltas_;       ///< gradients of each layer's output before ReLU
  DeviceArray<float> product_;                   ///< what cuBLAS computed last
  DeviceArray<std::int32_t> order_;
  DeviceArray<float> losses_;
  DeviceArray<float> loss_sum_;
  DeviceArray<std::int32_t> predictions_;
  const DeviceSamples* used_ = nullptr;
  std::size_t count_ = 0;  ///< samples in the order
  Block block_;
};

}  // namespace mlp
