// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "block.hpp"
#include "digits.hpp"
#include "layout.hpp"
#include "loss_sum.hpp"

#include <shardopt/shardopt.hpp>

#include <cblas.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <numeric>
#include <span>
#include <type_traits>
#include <vector>

namespace mlp {

/// The network on the host: products by BLAS, in fp32 whatever parameters and gradients are stored in. Its
/// results are a function of the weights and the block of samples alone (BLAS must run on one thread a rank).
template <class Param, class Grad>
class HostNetwork {
 public:
  using Stream = shardopt::Host::Stream;

  static constexpr const char* device_name = "host";

  HostNetwork(const Layout& layout, const Digits&, int largest_block)
      : layout_(layout), parameters_(layout.size()), gradients_(layout.size()) {
    const auto rows = static_cast<std::size_t>(largest_block);
    activations_.emplace_back(rows * static_cast<std::size_t>(layout[0].inputs));
    std::size_t largest = 0;
    for (const Layer& layer : layout.layers) {
      activations_.emplace_back(rows * static_cast<std::size_t>(layer.outputs));
      deltas_.emplace_back(rows * static_cast<std::size_t>(layer.outputs));
      weights_.emplace_back(std::is_same_v<Param, float> ? 0 : static_cast<std::size_t>(layer.weights()));
      largest = std::max(largest, static_cast<std::size_t>(layer.weights()));
    }
    scratch_.resize(largest);
  }

  /// Bytes that the process holds in memory, all ranks together.
  static std::int64_t memory_in_use() {
    long long pages = 0;
    std::ifstream("/proc/self/statm").ignore(64, ' ') >> pages;
    return pages * sysconf(_SC_PAGESIZE);
  }

  [[nodiscard]] Param* parameters() { return parameters_.data(); }
  [[nodiscard]] Grad* gradients() { return gradients_.data(); }
  [[nodiscard]] Stream stream() const { return {}; }

  /// Sets all parameters, rounded to their type, and clears the gradients.
  void initialize(const std::vector<float>& flat) {
    std::transform(flat.begin(), flat.end(), parameters_.begin(), shardopt::from_float<Param>);
    std::fill(gradients_.begin(), gradients_.end(), shardopt::from_float<Grad>(0.0F));
  }

  /// A copy of the flat parameter buffer.
  [[nodiscard]] std::vector<Param> download() const { return parameters_; }

  /// Names the samples that blocks are taken from, and their order.
  void use(const Samples& samples, const std::vector<std::int32_t>& order) {
    samples_ = &samples;
    order_ = order;
    losses_.assign(order.size(), 0.0F);
    predictions_.assign(order.size(), 0);
  }

  /// Makes a block the input of the first layer.
  void load(Block block) {
    block_ = block;
    constexpr std::size_t width = Samples::pixels_per_image;
    for (std::size_t row = 0; row < rows(); ++row) {
      const auto from = samples_->pixels.begin() + static_cast<std::ptrdiff_t>(sample(row) * width);
      std::copy_n(from, width, activations_[0].begin() + static_cast<std::ptrdiff_t>(row * width));
    }
  }

  /// Computes a layer's output: ReLU(x Wᵀ + b), without ReLU in the last.
  void forward(int at) {
    const Layer& layer = layout_[at];
    float* out = activations_[index(at) + 1].data();
    refresh_weights(at);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, block_.count, layer.outputs, layer.inputs, 1.0F,
                activations_[index(at)].data(), layer.inputs, weights(at), layer.inputs, 0.0F, out,
                layer.outputs);
    const bool hidden = at + 1 < layout_.depth();
    for (std::size_t row = 0; row < rows(); ++row) {
      for (std::size_t column = 0; column < index(layer.outputs); ++column, ++out) {
        const float sum = *out + shardopt::to_float(parameters_[index(layer.bias) + column]);
        *out = hidden && !(sum > 0.0F) ? 0.0F : sum;
      }
    }
  }

  /// Softmax and cross-entropy of the last layer's output: notes each sample's loss and the gradient of their
  /// sum.
  void loss() {
    const std::size_t classes = index(layout_.layers.back().outputs);
    for (std::size_t row = 0; row < rows(); ++row) {
      const std::span<const float> logits(activations_.back().data() + row * classes, classes);
      const std::span<float> delta(deltas_.back().data() + row * classes, classes);
      const std::size_t label = index(samples_->labels[sample(row)]);
      const float largest = *std::max_element(logits.begin(), logits.end());
      float sum = 0.0F;
      for (std::size_t c = 0; c < classes; ++c) sum += delta[c] = std::exp(logits[c] - largest);
      for (float& value : delta) value /= sum;
      delta[label] -= 1.0F;
      losses_[index(block_.first) + row] = std::log(sum) - (logits[label] - largest);
    }
  }

  /// Adds the block's gradient of a layer, computed apart, to the gradient buffer, and passes the rest down.
  void backward(int at) {
    const Layer& layer = layout_[at];
    const float* in = activations_[index(at)].data();
    const float* delta = deltas_[index(at)].data();
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, layer.outputs, layer.inputs, block_.count, 1.0F,
                delta, layer.outputs, in, layer.inputs, 0.0F, scratch_.data(), layer.inputs);
    add_gradient(layer.weight, {scratch_.data(), index(layer.weights())});
    for (std::size_t column = 0; column < index(layer.outputs); ++column) {
      float sum = 0.0F;
      for (std::size_t row = 0; row < rows(); ++row) sum += delta[row * index(layer.outputs) + column];
      add_gradient(layer.bias + static_cast<std::int64_t>(column), {&sum, 1});
    }
    if (at == 0) return;
    float* below = deltas_[index(at) - 1].data();
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, block_.count, layer.inputs, layer.outputs, 1.0F,
                delta, layer.outputs, weights(at), layer.inputs, 0.0F, below, layer.inputs);
    for (std::size_t n = 0; n < rows() * index(layer.inputs); ++n) {
      if (!(in[n] > 0.0F)) below[n] = 0.0F;
    }
  }

  /// Notes the most likely class of each sample of the block.
  void predict() {
    const std::size_t classes = index(layout_.layers.back().outputs);
    for (std::size_t row = 0; row < rows(); ++row) {
      const float* logits = activations_.back().data() + row * classes;
      predictions_[index(block_.first) + row] =
          static_cast<std::int32_t>(std::max_element(logits, logits + classes) - logits);
    }
  }

  /// Sums the losses that loss() noted for a run of samples. @return where the sum stands, in two parts
  LossSum sum_losses(Block block) {
    const auto first = losses_.begin() + block.first;
    const double total = std::accumulate(first, first + block.count, 0.0);
    loss_sum_[0] = static_cast<float>(total);
    loss_sum_[1] = static_cast<float>(total - loss_sum_[0]);
    return {&loss_sum_[0], &loss_sum_[1]};
  }

  /// The classes noted since use(), in its order.
  [[nodiscard]] std::vector<std::int32_t> predictions() const { return predictions_; }

 private:
  static std::size_t index(std::int64_t value) { return static_cast<std::size_t>(value); }
  [[nodiscard]] std::size_t rows() const { return index(block_.count); }
  [[nodiscard]] std::size_t sample(std::size_t row) const { return index(order_[index(block_.first) + row]); }

  /// Widens a layer's weights where they are stored in 16 bits.
  void refresh_weights(int at) {
    if constexpr (!std::is_same_v<Param, float>) {
      const Param* stored = parameters_.data() + layout_[at].weight;
      std::vector<float>& wide = weights_[index(at)];
      for (std::size_t n = 0; n < wide.size(); ++n) wide[n] = shardopt::to_float(stored[n]);
    }
  }

  [[nodiscard]] const float* weights(int at) const {
    if constexpr (std::is_same_v<Param, float>) {
      return parameters_.data() + layout_[at].weight;
    } else {
      return weights_[index(at)].data();
    }
  }

  void add_gradient(std::int64_t offset, std::span<const float> values) {
    Grad* sum = gradients_.data() + offset;
    for (const float value : values) {
      *sum = shardopt::from_float<Grad>(shardopt::to_float(*sum) + value);
      ++sum;
    }
  }

  const Layout& layout_;
  std::vector<Param> parameters_;
  std::vector<Grad> gradients_;
  std::vector<std::vector<float>> activations_;  ///< of the input and of each layer: rows × width
  std::vector<std::vector<float>> deltas_;       ///< gradients of each layer's output before ReLU
  std::vector<std::vector<float>> weights_;      ///< fp32 copies, if stored in 16 bits
  std::vector<float> scratch_;                   ///< one micro-batch's gradient of one layer's weights
  const Samples* samples_ = nullptr;
  std::vector<std::int32_t> order_;
  std::vector<float> losses_;
  std::array<float, 2> loss_sum_ = {};
  std::vector<std::int32_t> predictions_;
  Block block_;
};

}  // namespace mlp
