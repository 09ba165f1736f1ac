// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/checkpoint/checkpoint.hpp>
#include <shardopt/checkpoint/checkpoint_error.hpp>
#include <shardopt/checkpoint/element_reader.hpp>
#include <shardopt/checkpoint/extracts.hpp>
#include <shardopt/checkpoint/manifest_differences.hpp>
#include <shardopt/checkpoint/merge.hpp>
#include <shardopt/checkpoint/parameter_index.hpp>
#include <shardopt/checkpoint/stream_states.hpp>
#include <shardopt/checkpoint/verify.hpp>
#include <shardopt/core/math.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace shardopt::inline v0::checkpoint {

/// Where a state of a parameter is not the same bits in two checkpoints.
struct TensorDifference {
  std::string parameter;       ///< its name
  std::string state;           ///< "master", "exp_avg", …
  std::int64_t elements = 0;   ///< of the parameter
  std::int64_t differing = 0;  ///< elements whose bits differ; more than 0
  double largest = 0;          ///< absolute difference; infinite where NaN or infinity meets another value
  std::int64_t first = 0;      ///< lowest index in the parameter, row by row …
  float first_a = 0;           ///< … what A has there …
  float first_b = 0;           ///< … and B
};

/// What differs between two checkpoints.
struct DiffReport {
  std::vector<std::string> manifest = {};      ///< counters, rule, hyper-parameters, table, … in words
  std::vector<std::string> storage = {};       ///< world, sharding, …: the same content stored otherwise
  std::vector<TensorDifference> tensors = {};  ///< by parameter in numeric order of names
  std::int64_t tensors_compared = 0;           ///< those that both have in the same shape

  /// Whether training would go on the same from either.
  [[nodiscard]] bool same() const noexcept { return manifest.empty() && tensors.empty(); }
};

namespace detail {

/// The tensors that two checkpoints have in common, and how far they are apart.
class TensorComparison {
 public:
  TensorComparison(const Checkpoint& a, const Checkpoint& b) : a_(a), reader_(b) {
    const Manifest& in_a = a.manifest();
    const Manifest& in_b = b.manifest();
    const ParameterIndex parameters_of_b(in_b);
    for (const std::size_t k : in_numeric_order(in_a)) {
      const auto& parameter = in_a.parameters[k];
      const auto other = parameters_of_b.find(parameter.name);
      if (!other || !in_b.parameters[*other].has_state() || in_b.parameters[*other].shape != parameter.shape)
        continue;
      for (std::size_t s = 0; s < in_a.states.size(); ++s) {
        const auto state = std::find(in_b.states.begin(), in_b.states.end(), in_a.states[s]);
        if (state == in_b.states.end()) continue;
        wanted_.add(s, static_cast<std::int64_t>(k), {0, parameter.numel()}, tensors_.size(), 0);
        tensors_.push_back({static_cast<std::size_t>(state - in_b.states.begin()),
                            static_cast<std::int64_t>(*other),
                            {.parameter = parameter.name,
                             .state = in_a.states[s],
                             .elements = parameter.numel(),
                             .first = (std::numeric_limits<std::int64_t>::max)()}});
      }
    }
  }

  /// @param told  is called with the bytes of A read so far
  template <class Told>
  void run(const Told& told) {
    stream_states(
        a_, wanted_, true,
        [&](std::size_t tensor, std::int64_t offset, std::span<const std::byte> bytes) {
          compare_bytes(tensors_[tensor], offset, bytes);
        },
        told);
  }

  void take(DiffReport& report) && {
    report.tensors_compared = static_cast<std::int64_t>(tensors_.size());
    for (Tensor& tensor : tensors_) {
      if (tensor.difference.differing > 0) report.tensors.push_back(std::move(tensor.difference));
    }
  }

 private:
  struct Tensor {
    std::size_t state;       ///< in B
    std::int64_t parameter;  ///< in B
    TensorDifference difference;
  };

  /// Data of other programs' files may begin anywhere, so that blocks cut elements. The rest of an element
  /// comes with the next call. @param offset  of the bytes, in the tensor
  void compare_bytes(Tensor& tensor, std::int64_t offset, std::span<const std::byte> bytes) {
    const std::size_t missing = cut_.empty() ? 0 : (std::min)(sizeof(float) - cut_.size(), bytes.size());
    cut_.insert(cut_.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(missing));
    bytes = bytes.subspan(missing);
    offset += static_cast<std::int64_t>(missing);
    constexpr std::int64_t size = sizeof(float);
    if (cut_.size() == sizeof(float)) {
      compare(tensor, offset / size - 1, cut_);
      cut_.clear();
    }
    const std::size_t whole = bytes.size() / sizeof(float) * sizeof(float);
    if (whole > 0) compare(tensor, offset / size, bytes.first(whole));
    cut_.insert(cut_.end(), bytes.begin() + static_cast<std::ptrdiff_t>(whole), bytes.end());
  }

  void compare(Tensor& tensor, std::int64_t begin, std::span<const std::byte> bytes) {
    mine_.resize(bytes.size() / sizeof(float));
    theirs_.resize(mine_.size());
    std::memcpy(mine_.data(), bytes.data(), bytes.size());
    reader_.read(tensor.state, tensor.parameter, begin, theirs_);
    if (std::memcmp(mine_.data(), theirs_.data(), bytes.size()) == 0) return;
    for (std::size_t k = 0; k < mine_.size(); ++k) {
      if (std::bit_cast<std::uint32_t>(mine_[k]) != std::bit_cast<std::uint32_t>(theirs_[k]))
        count(tensor.difference, begin + static_cast<std::int64_t>(k), mine_[k], theirs_[k]);
    }
  }

  static void count(TensorDifference& difference, std::int64_t index, float a, float b) {
    const double apart = std::abs(static_cast<double>(a) - static_cast<double>(b));
    ++difference.differing;
    // By bits: -Ofast folds std::isfinite.
    const bool finite = math::is_finite(a) && math::is_finite(b);
    difference.largest =
        finite ? (std::max)(difference.largest, apart) : std::numeric_limits<double>::infinity();
    if (index >= difference.first) return;
    difference.first = index;
    difference.first_a = a;
    difference.first_b = b;
  }

  const Checkpoint& a_;
  ElementReader reader_;
  WantedStates wanted_;
  std::vector<Tensor> tensors_;
  std::vector<std::byte> cut_;  ///< the beginning of an element
  std::vector<float> mine_;
  std::vector<float> theirs_;
};

}  // namespace detail

/// Compares two checkpoints of any worlds, generations or merged files: what the manifests say, and each
/// state of each parameter, bit by bit. What only one of them has, or in another shape, is a difference of
/// the manifests and compared no further.
///
/// Reads A once and B twice (verified first, then by elements), and holds a block of each (1 MiB), whatever
/// the size.
/// @param progress  is told how many bytes have been read
/// @throws CheckpointError if one of them is damaged
[[nodiscard]] inline DiffReport diff(const Checkpoint& a, const Checkpoint& b,
                                     const Progress& progress = {}) {
  detail::ManifestDifferences differences(a.manifest(), b.manifest());
  DiffReport report{.manifest = std::move(differences).meaning(),
                    .storage = std::move(differences).storage()};
  if (a.merged() != b.merged())
    report.storage.push_back(std::string(a.merged() ? "A" : "B") + " is a merged file");
  const std::int64_t of_b = total_bytes(b.manifest());
  const std::int64_t total = total_bytes(a.manifest()) + of_b;
  const auto told = [&](std::int64_t done) {
    if (progress) progress(done, total);
  };
  const std::vector<std::string> problems = verify(b, [&](std::int64_t done, std::int64_t) { told(done); });
  if (!problems.empty()) throw CheckpointError(problems.front());
  detail::require_clean_folder(a);
  detail::TensorComparison comparison(a, b);
  comparison.run([&](std::int64_t done) { told(of_b + done); });
  std::move(comparison).take(report);
  return report;
}

}  // namespace shardopt::inline v0::checkpoint
