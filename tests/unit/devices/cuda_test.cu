// SPDX-License-Identifier: Apache-2.0
#include <shardopt/devices/cuda.cuh>

#include <shardopt/devices/host.hpp>
#include <shardopt/precision/mixed.hpp>
#include <shardopt/rules/adamw.hpp>
#include <shardopt/rules/sgd.hpp>
#include <support/cuda_ranks.hpp>
#include <support/numbers.hpp>
#include <support/require_devices.hpp>

#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

// Indices beyond 32 bits, in little memory: kernels get a base that lies so far in front of a buffer that the
// large index falls into it.

using namespace test;

namespace {

/// The base from which `address` is element `index`.
template <class T>
T* base_of(T* address, std::int64_t index) {
  return reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(address) -
                              static_cast<std::uintptr_t>(index) * sizeof(T));
}

/// Lengths of tiles: full, without a quad, with a head and a tail, of one element.
constexpr std::uint32_t counts[] = {2048, 3, 1029, 1, 255, 2048};
constexpr std::size_t tile_count = std::size(counts);
/// Between tiles, in every buffer.
constexpr std::int64_t gap = 3;

constexpr std::int64_t places() {
  std::int64_t sum = gap;
  for (const std::uint32_t count : counts) sum += count + gap;
  return sum;
}
constexpr auto buffer_size = static_cast<std::size_t>(places()) + 8;

/// A tile is element `at` of each buffer. @param far  added to its index of state
std::vector<so::Tile> tiles_over(void* parameters, void* gradients, std::size_t parameter_bytes,
                                 std::size_t gradient_bytes, std::int64_t far) {
  std::vector<so::Tile> tiles;
  std::int64_t at = gap;
  for (std::size_t k = 0; k < tile_count; ++k) {
    tiles.push_back(
        {.parameter = static_cast<std::byte*>(parameters) + static_cast<std::size_t>(at) * parameter_bytes,
         .gradient = static_cast<std::byte*>(gradients) + static_cast<std::size_t>(at) * gradient_bytes,
         .state = far + at,
         .count = counts[k],
         .group = static_cast<std::uint16_t>(k % 2),
         .phase = static_cast<std::uint16_t>(counts[k] == so::tile_elements ? 0 : k * 37)});
    at += counts[k] + gap;
  }
  return tiles;
}

template <class T>
std::vector<T> any(std::uint64_t seed) {
  std::vector<T> result;
  for (std::size_t k = 0; k < buffer_size; ++k)
    result.push_back(rounded<T>(static_cast<double>(noise(seed, k) % 2000001) * 1e-6 - 1.0));
  return result;
}

/// The same numbers in host memory and on the GPU, `slip` elements behind an aligned address.
template <class T>
class Buffer {
 public:
  Buffer(std::vector<T> values, std::size_t slip, cudaStream_t stream)
      : host_(std::move(values)), device_(host_.size()), slip_(slip) {
    device_.write(host_, stream);
  }
  [[nodiscard]] T* host() { return host_.data() + slip_; }
  [[nodiscard]] T* device() const { return device_.data() + slip_; }
  /// Whether both hold the same bits, also where nothing was to be written.
  [[nodiscard]] bool agrees(cudaStream_t stream) const {
    return std::memcmp(device_.read(stream).data(), host_.data(), device_.bytes()) == 0;
  }

 private:
  std::vector<T> host_;
  OwnMemory<T> device_;
  std::size_t slip_;
};

/// Before the first bit that 32 do not hold, signed and unsigned, so that a tile lies across; and beyond.
std::int64_t far_index() {
  return GENERATE((std::int64_t{1} << 31) - 700, (std::int64_t{1} << 32) - 700, (std::int64_t{1} << 33) + 3);
}

template <class RuleType, class PrecisionType, bool keeps_state>
struct Case {
  using Rule = RuleType;
  using Precision = PrecisionType;
  static constexpr bool stateful = keeps_state;
};

template <class T>
__global__ void load_received(const T* own, const T* received, std::int64_t count, std::int64_t at, int rank,
                              int source, float* out) {
  *out = so::detail::LoadReceived<T>{own, received, count, at, rank}(source);
}

template <class T>
__global__ void load_source(so::detail::Sources sources, std::int64_t at, int source, float* out) {
  *out = so::detail::LoadSource<T>{sources, at}(source);
}

}  // namespace

TEMPLATE_TEST_CASE("The update reaches states and masters beyond 2^31 and 2^32 elements",
                   "[devices][cuda][B012]", (Case<so::AdamW, so::FullPrecision, true>),
                   (Case<so::AdamW, so::Mixed<so::bf16, so::bf16, float>, true>),
                   (Case<so::AdamW, so::Mixed<so::fp16, float, float>, true>),
                   (Case<so::SGD, so::Mixed<so::bf16, so::bf16, float>, false>)) {
  using Rule = typename TestType::Rule;
  using Precision = typename TestType::Precision;
  const std::int64_t far = far_index();
  const std::size_t slip = GENERATE(0U, 1U, 3U);  // of states; other buffers begin elsewhere
  CAPTURE(far, slip);
  require_devices(1);
  const OwnStream stream;
  Buffer parameters(any<typename Precision::Param>(1), (slip + 1) % 4, stream);
  Buffer gradients(any<typename Precision::Grad>(2), (slip + 2) % 4, stream);
  Buffer master(any<float>(3), slip, stream);
  Buffer first(any<float>(4), slip, stream);
  std::vector<float> squares = any<float>(5);
  for (float& square : squares) square *= square;
  Buffer second(std::move(squares), slip, stream);

  const Rule rules[2] = {{.lr = 0.1, .weight_decay = 0.05}, {.lr = 0.03}};
  const std::vector<typename Rule::Constants> constants{rules[0].constants({0.7f, 3}),
                                                        rules[1].constants({0.7f, 3})};
  const so::StepVerdict verdict{.gradient_factor = 0.3f, .go = 1};
  const auto tiles = tiles_over(parameters.host(), gradients.host(), sizeof(typename Precision::Param),
                                sizeof(typename Precision::Grad), 0);
  so::UpdateArguments<Rule, Precision> arguments{.tiles = tiles.data(),
                                                 .tile_count = tile_count,
                                                 .states = {},
                                                 .master = Precision::has_master ? master.host() : nullptr,
                                                 .constants = constants.data(),
                                                 .verdict = &verdict,
                                                 .stateful = TestType::stateful};
  if (TestType::stateful) {
    arguments.states[0] = first.host();
    if (so::state_count < Rule >> 1) arguments.states[1] = second.host();
  }
  so::Host{}.update(arguments, {});

  const OwnMemory<so::Tile> device_tiles(tile_count);
  device_tiles.write(tiles_over(parameters.device(), gradients.device(), sizeof(typename Precision::Param),
                                sizeof(typename Precision::Grad), far),
                     stream);
  const OwnMemory<typename Rule::Constants> device_constants(constants.size());
  device_constants.write(constants, stream);
  const OwnMemory<so::StepVerdict> device_verdict(1);
  device_verdict.write({verdict}, stream);
  arguments.tiles = device_tiles.data();
  arguments.constants = device_constants.data();
  arguments.verdict = device_verdict.data();
  if (Precision::has_master) arguments.master = base_of(master.device(), far);
  if (TestType::stateful) {
    arguments.states[0] = base_of(first.device(), far);
    if (so::state_count < Rule >> 1) arguments.states[1] = base_of(second.device(), far);
  }
  so::Cuda(0).update(arguments, stream);
  CHECK(parameters.agrees(stream));
  CHECK(gradients.agrees(stream));
  CHECK(master.agrees(stream));
  CHECK(first.agrees(stream));
  CHECK(second.agrees(stream));
}

TEMPLATE_TEST_CASE("Staging buffers and masters are reached beyond 2^31 and 2^32 elements",
                   "[devices][cuda][B012]", float, so::bf16, so::fp16) {
  const std::int64_t far = far_index();
  const std::size_t slip = GENERATE(0U, 1U);
  CAPTURE(far, slip);
  require_devices(1);
  const OwnStream stream;
  const so::Cuda cuda(0);
  const so::Host host;
  Buffer parameters(any<TestType>(1), slip, stream);
  Buffer gradients(any<TestType>(2), 1 - slip, stream);
  Buffer staging(any<TestType>(3), slip, stream);
  Buffer master(any<float>(4), 1, stream);
  const auto tiles = tiles_over(parameters.host(), gradients.host(), sizeof(TestType), sizeof(TestType), 0);
  const OwnMemory<so::Tile> device_tiles(tile_count);
  device_tiles.write(
      tiles_over(parameters.device(), gradients.device(), sizeof(TestType), sizeof(TestType), far), stream);
  TestType* const far_staging = base_of(staging.device(), far);
  float* const far_master = base_of(master.device(), far);

  host.pack(tiles.data(), tile_count, so::TileField::gradient, staging.host(), {});
  cuda.pack(device_tiles.data(), tile_count, so::TileField::gradient, far_staging, stream);
  CHECK(staging.agrees(stream));
  host.unpack(tiles.data(), tile_count, so::TileField::parameter, staging.host(), {});
  cuda.unpack(device_tiles.data(), tile_count, so::TileField::parameter, far_staging, stream);
  CHECK(parameters.agrees(stream));
  host.template initialize_masters<TestType>(tiles.data(), tile_count, master.host(), {});
  cuda.template initialize_masters<TestType>(device_tiles.data(), tile_count, far_master, stream);
  CHECK(master.agrees(stream));

  Buffer others(any<float>(5), 0, stream);
  host.template round_masters<TestType>(tiles.data(), tile_count, others.host(), {});
  cuda.template round_masters<TestType>(device_tiles.data(), tile_count, base_of(others.device(), far),
                                        stream);
  CHECK(parameters.agrees(stream));
  CHECK(gradients.agrees(stream));
}

TEMPLATE_TEST_CASE("Ranks' elements are found beyond 2^31 and 2^32 elements", "[devices][cuda][B012]", float,
                   so::bf16, so::fp16) {
  // Elements of a block, and blocks of other ranks, behind each other.
  const std::int64_t count =
      GENERATE(std::int64_t{5}, (std::int64_t{1} << 31) + 7, (std::int64_t{1} << 33) + 9);
  const std::int64_t at = GENERATE_COPY(std::int64_t{0}, count - 2);
  const int rank = GENERATE(0, 2, 3);
  CAPTURE(count, at, rank);
  require_devices(1);
  const OwnStream stream;
  const OwnMemory<TestType> element(1);
  const OwnMemory<float> out(1);
  element.write({rounded<TestType>(1.5)}, stream);
  const auto read = [&] {
    const float value = out.read(stream)[0];
    out.fill(0, stream);
    return value;
  };
  for (int source = 0; source < 4; ++source) {
    CAPTURE(source);
    TestType* const own = base_of(element.data(), at);
    const std::int64_t slot = source < rank ? source : source - 1;
    const bool is_own = source == rank;
    load_received<TestType><<<1, 1, 0, stream>>>(
        is_own ? own : nullptr, is_own ? nullptr : base_of(element.data(), slot * count + at), count, at,
        rank, source, out.data());
    CHECK(read() == 1.5f);
    so::detail::Sources sources{};
    sources.addresses[source] = own;
    load_source<TestType><<<1, 1, 0, stream>>>(sources, at, source, out.data());
    CHECK(read() == 1.5f);
  }
}

TEMPLATE_TEST_CASE("Digests count elements beyond 2^31 and 2^32", "[devices][cuda][B012]", std::uint16_t,
                   std::uint32_t) {
  const std::int64_t far = far_index();
  CAPTURE(far);
  require_devices(1);
  const OwnStream stream;
  std::vector<TestType> elements;
  for (std::size_t k = 0; k < 1031; ++k) elements.push_back(static_cast<TestType>(noise(k)));
  std::uint64_t expected = 0;
  so::Host{}.add_digest(elements.data(), 1031, static_cast<std::uint64_t>(far), &expected, {});
  const OwnMemory<TestType> device_elements(elements.size());
  device_elements.write(elements, stream);
  const OwnMemory<std::uint64_t> sum(1);
  sum.write({0}, stream);
  so::Cuda(0).add_digest(device_elements.data(), 1031, static_cast<std::uint64_t>(far), sum.data(), stream);
  CHECK(sum.read(stream)[0] == expected);
}
