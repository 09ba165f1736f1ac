// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <shardopt/collectives/collective.hpp>
#include <shardopt/core/convert.hpp>
#include <shardopt/core/parameter_table.hpp>
#include <shardopt/zero/step_control.hpp>
#include <shardopt/zero/step_result.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

/// What an engine does with an optimizer, written down so that any collective on any device can do it, and
/// what came of it.
namespace test {

namespace so = shardopt;

/// How the engine hands its memory over.
enum class MemoryKind { own, arena, state_buffers };

/// How gradients are announced.
enum class Announce { nothing, one_by_one_from_the_last, in_sets, some };

struct Workload {
  std::string name;
  std::vector<so::ParameterInfo> parameters = {};  ///< with offsets; `separate` turns them into addresses
  std::int64_t extent = 0;                         ///< elements of both flat buffers, gaps and tail included
  int world = 1;
  int steps = 12;
  int variant = 0;  ///< of the case's hyper-parameters
  std::int64_t bucket_bytes = 4096;
  so::Reduction reduction = so::Reduction::ordered;
  float max_norm = 2.0f;
  so::NonFinite non_finite = so::NonFinite::skip;
  bool count_skipped = false;
  bool separate = false;
  int shift_parameters = 0;  ///< elements by which the flat buffers begin after an allocation
  int shift_gradients = 0;
  MemoryKind memory = MemoryKind::own;
  Announce announce = Announce::nothing;
  int infinite_step = 5;    ///< some rank's gradient holds an infinity; -1: never
  int zero_step = 8;        ///< all gradients are 0
  int discarded_step = 10;  ///< the engine decides against it
  float magnitude = 1.0f;
  std::uint64_t seed = 1;
  /// Hyper-parameters that replace the case's in all groups, where the rule has them.
  struct Hyper {
    std::optional<double> lr = {};
    std::optional<double> beta1 = {};
    std::optional<double> beta2 = {};
    std::optional<double> eps = {};
    std::optional<double> weight_decay = {};
    std::optional<double> momentum = {};
  };
  Hyper hyper = {};
  int scaled_for = 0;     ///< the world whose gradient scales are used, if not this one
  bool unscaled = false;  ///< learning-rate factor and gradient scale stay 1
  /// Values that replace the noise.
  std::function<float(std::int64_t offset)> given_parameter = {};
  std::function<float(int step, int rank, std::int64_t offset)> given_gradient = {};
};

/// What one rank saw. Buffers are whole, poison in gaps included.
struct RankOutcome {
  std::vector<std::byte> initial;                  ///< parameters before the first step
  std::vector<std::vector<std::byte>> parameters;  ///< after each step
  std::vector<std::vector<std::byte>> gradients;   ///< after each step
  std::map<std::string, std::vector<float>> states;
  std::vector<so::StepResult> results;
  struct Part {
    std::string name;
    so::Range range;
    friend bool operator==(const Part&, const Part&) = default;
  };
  std::vector<Part> owned;
  std::vector<std::vector<std::byte>> written;  ///< the gradients as this rank wrote them, before each step
  std::string guard_fault;                      ///< which guard around the memory handed over lost its bits
};
using Outcome = std::vector<RankOutcome>;

/// How the bytes of the buffers are to be read.
struct ElementTypes {
  so::Dtype parameter;
  so::Dtype gradient;
};

inline constexpr unsigned char poison = 0xb7;

/// A table of awkward sizes: 0, 1, scalars, primes, grain and tile ± 1; gaps, three groups, frozen, tied.
[[nodiscard]] Workload awkward(int world);
/// One dense run of several parameters and buckets, all slices but the last equal.
[[nodiscard]] Workload dense(int world);
/// Three elements: most ranks own nothing.
[[nodiscard]] Workload tiny(int world);
/// Parameters of the given sizes, one behind the other, in group "plain"; plain steps with factors of 1 and
/// no clipping.
[[nodiscard]] Workload sized(int world, const std::vector<std::int64_t>& sizes);

[[nodiscard]] so::ParameterTable table_of(const Workload& workload, void* parameters, void* gradients,
                                          const ElementTypes& types);

/// Reproducible noise in (-1, 1).
[[nodiscard]] float noise(std::uint64_t a, std::uint64_t b, std::uint64_t c, std::uint64_t d);

[[nodiscard]] float initial_parameter(const Workload& workload, std::int64_t offset);
[[nodiscard]] float gradient(const Workload& workload, int step, int rank, std::int64_t offset);
[[nodiscard]] float lr_factor(const Workload& workload, int step);
[[nodiscard]] float gradient_scale(const Workload& workload, int step);

/// Which elements of the flat buffers are of which kind.
enum class Place : unsigned char { gap, frozen, trainable };
[[nodiscard]] std::vector<Place> places(const Workload& workload);

/// A buffer of poison with the parameters' elements set: value(offset).
template <class T, class Value>
[[nodiscard]] std::vector<std::byte> filled(const Workload& workload, const Value& value) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(workload.extent) * sizeof(T), std::byte{poison});
  const std::vector<Place> kinds = places(workload);
  for (std::int64_t k = 0; k < workload.extent; ++k) {
    if (kinds[static_cast<std::size_t>(k)] == Place::gap) continue;
    const T element = so::from_float<T>(value(k));
    std::memcpy(bytes.data() + static_cast<std::size_t>(k) * sizeof(T), &element, sizeof element);
  }
  return bytes;
}

/// "" where two outcomes are the same (NaNs by class), else the first difference.
[[nodiscard]] std::string difference(const Outcome& a, const Outcome& b, const ElementTypes& types);

/// "" where only what may be written was: parameters, own slices of gradients; else the first element that
/// was not.
[[nodiscard]] std::string foreign_writes(const Workload& workload, const Outcome& outcome,
                                         const ElementTypes& types);

/// An element of a buffer as a number.
[[nodiscard]] float element(const std::vector<std::byte>& bytes, so::Dtype type, std::int64_t index);

/// The reduced gradient of each step, put together from the slices that the ranks own; by table offset.
[[nodiscard]] std::vector<std::vector<float>> reduced_gradients(const Workload& workload,
                                                                const Outcome& outcome,
                                                                const ElementTypes& types);

/// One rank that kept all, put together from what each rank owns.
[[nodiscard]] std::map<std::string, std::vector<float>> whole_states(const Workload& workload,
                                                                     const Outcome& outcome);

}  // namespace test
