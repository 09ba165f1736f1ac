// SPDX-License-Identifier: Apache-2.0
#include <laws/cuda/case_list.hpp>
#include <support/require_devices.hpp>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

namespace {

using namespace test;

/// What engines do differently, dealt out over the cases so that each meets each.
Workload varied(Workload w, std::size_t turn) {
  w.seed = 100 + turn;
  w.variant = static_cast<int>(turn / 3 % 2);
  w.separate = turn % 5 == 2;
  w.shift_parameters = turn % 5 == 2 ? 0 : static_cast<int>(turn % 4);
  w.shift_gradients = turn % 5 == 2 ? 0 : static_cast<int>(turn / 2 % 4);
  w.memory = static_cast<MemoryKind>(turn % 3);
  w.announce = static_cast<Announce>(turn / 3 % 4);
  w.count_skipped = turn % 2 == 1;
  if (turn % 7 == 3) w.max_norm = std::numeric_limits<float>::infinity();
  if (turn % 2 == 0) w.bucket_bytes *= 3;
  return w;
}

void check_same_bits(const NamedCase& c, const Workload& w) {
  CAPTURE(c.name, w.name, w.world, w.variant, w.separate, w.shift_parameters, w.shift_gradients,
          static_cast<int>(w.memory), static_cast<int>(w.announce), w.bucket_bytes, w.max_norm, w.seed);
  const Outcome host = c.on_host(w);
  const Outcome cuda = c.on_nccl(w);
  CHECK(difference(host, cuda, c.types) == "");
  CHECK(foreign_writes(w, host, c.types) == "");
  CHECK(foreign_writes(w, cuda, c.types) == "");
}

/// Threads<Cuda> against Threads<Host>; rank r on GPU `devices[r]`.
template <class Case>
void check_threads(const Workload& w, const std::vector<int>& devices) {
  CAPTURE(devices, w.name, w.world, w.variant, w.separate, w.shift_parameters, w.shift_gradients,
          static_cast<int>(w.memory), static_cast<int>(w.announce), w.bucket_bytes, w.max_norm, w.seed);
  const Outcome host = run_on_host<Case>(w);
  const Outcome cuda = run_on_threads_cuda<Case>(w, devices);
  CHECK(difference(host, cuda, Case::types) == "");
  CHECK(foreign_writes(w, cuda, Case::types) == "");
}

}  // namespace

TEST_CASE("Host and GPUs give the same bits under an ordered reduction, and write nothing else",
          "[laws][cuda][law3][law5]") {
  const std::size_t index = GENERATE(range(std::size_t{0}, cases().size()));
  // Each case in two worlds; policies and precisions meet all of them.
  constexpr std::array<int, 5> worlds{4, 2, 3, 8, 1};
  const std::size_t round = GENERATE(std::size_t{0}, std::size_t{1});
  const int world = worlds[(index + index / 4 + 3 * round) % worlds.size()];
  require_devices(world);
  const bool contiguous = (index + round) % 3 == 1;
  check_same_bits(cases()[index], varied(contiguous ? dense(world) : awkward(world), index + 5 * round));
}

TEST_CASE("The comparison of host and GPUs sees one other bit", "[laws][cuda][law3]") {
  require_devices(2);
  const NamedCase& c = cases()[9];
  const Workload w = awkward(2);
  const Outcome host = c.on_host(w);
  const auto flip = [](std::vector<std::byte>& bytes, std::size_t at) { bytes[at] ^= std::byte{1}; };
  CHECK(difference(host, host, c.types) == "");
  Outcome other = host;
  flip(other[1].parameters[7], 100);
  CHECK(difference(host, other, c.types) != "");
  other = host;
  flip(other[0].gradients[3], 64);
  CHECK(difference(host, other, c.types) != "");
  other = host;
  other[1].states.at("master")[5] *= -1.0f;
  CHECK(difference(host, other, c.types) != "");
  other = host;
  other[1].results[2].norm = std::nextafter(other[1].results[2].norm, 1e9);
  CHECK(difference(host, other, c.types) != "");
  other = host;
  flip(other[1].parameters[7], 0);  // a gap
  CHECK(foreign_writes(w, other, c.types) != "");
}

TEST_CASE("A world of one on a GPU gives the host's bits, by NCCL and without", "[laws][cuda][law3]") {
  require_devices(1);
  const std::size_t turn = GENERATE(std::size_t{0}, std::size_t{4});
  const Workload w = varied(awkward(1), turn);
  using Adam = Case<so::AdamW, so::FlatSharding, Fp32>;
  CHECK(difference(run_on_host<Adam>(w), run_on_solo_cuda<Adam>(w), Adam::types) == "");
  using Sign = Case<SignRule, so::PerParameterSharding, Bf16Fp32>;
  const Outcome solo = run_on_solo_cuda<Sign>(w);
  CHECK(difference(run_on_host<Sign>(w), solo, Sign::types) == "");
  CHECK(difference(run_on_nccl<Sign>(w), solo, Sign::types) == "");
}

TEST_CASE("Ranks that share one GPU give the host's bits", "[laws][cuda][law3][law5][B069]") {
  require_devices(1);
  const int world = GENERATE(3, 4, 8);
  const Workload w = varied(awkward(world), static_cast<std::size_t>(world));
  using Sign = Case<SignRule, so::PerParameterSharding, Bf16Fp32>;
  check_threads<Sign>(w, std::vector<int>(static_cast<std::size_t>(world), 0));
}

TEST_CASE("Ranks that are threads on several GPUs, or on some they share, give the host's bits",
          "[laws][cuda][law3][law5][B069]") {
  const std::vector<int> devices =
      GENERATE(values<std::vector<int>>({{0, 1}, {3, 1}, {0, 1, 0}, {2, 0, 1}, {0, 1, 2, 3}, {0, 0, 1, 1}}));
  require_peers(1 + *std::max_element(devices.begin(), devices.end()));
  const std::size_t turn = GENERATE(std::size_t{0}, std::size_t{1});
  const int world = static_cast<int>(devices.size());
  const auto made = [&](std::size_t more) {
    return varied(turn == 0 ? awkward(world) : dense(world), devices.size() + 3 * turn + more);
  };
  check_threads<Case<so::AdamW, so::FlatSharding, Fp32>>(made(0), devices);
  check_threads<Case<SignRule, so::PerParameterSharding, Bf16Fp32>>(made(1), devices);
  check_threads<Case<so::SGD, so::Replicated, Fp32>>(made(2), devices);
  check_threads<Case<SignRule, so::Replicated, Bf16>>(made(4), devices);
}

TEST_CASE("Non-finite gradients that the engine lets through give NaNs where the host has them",
          "[laws][cuda][law3]") {
  require_devices(3);
  Workload w = awkward(3);
  w.non_finite = so::NonFinite::propagate;
  w.given_gradient = [base = awkward(3)](int step, int rank, std::int64_t offset) {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    if (step == 4 && offset % 97 == 5) {
      const float specials[] = {infinity, -infinity, std::numeric_limits<float>::quiet_NaN()};
      return specials[(offset + rank) % 3];
    }
    return gradient(base, step, rank, offset);
  };
  for (const std::size_t index : {std::size_t{0}, std::size_t{2}, std::size_t{4}, std::size_t{13}}) {
    const NamedCase& c = cases()[index];
    CAPTURE(c.name);
    const Outcome host = c.on_host(w);
    CHECK(host.front().results[4].non_finite > 0);
    CHECK_FALSE(host.front().results[4].skipped);
    CHECK(difference(host, c.on_nccl(w), c.types) == "");
  }
}

TEST_CASE("Very small and very large gradients give the host's bits", "[laws][cuda][law3]") {
  // Subnormal numbers, and squares beyond the range of floats.
  require_devices(2);
  const float magnitude = GENERATE(3e-39f, 1e-30f, 1e25f);
  CAPTURE(magnitude);
  Workload w = dense(2);
  w.magnitude = magnitude;
  w.max_norm = magnitude < 1.0f ? 1e-38f : 1.0f;
  for (const std::size_t index : {std::size_t{0}, std::size_t{1}, std::size_t{3}, std::size_t{8}}) {
    const NamedCase& c = cases()[index];
    CAPTURE(c.name);
    CHECK(difference(c.on_host(w), c.on_nccl(w), c.types) == "");
  }
}

TEST_CASE("Host and GPUs give the same bits: every case in every world", "[laws][cuda][law3][law5][full]") {
  const std::size_t index = GENERATE(range(std::size_t{0}, cases().size()));
  const int world = GENERATE(1, 2, 3, 4, 5, 6, 7, 8);
  require_devices(world);
  const std::size_t turn = index + static_cast<std::size_t>(world) * 7;
  check_same_bits(cases()[index], varied(awkward(world), turn));
  check_same_bits(cases()[index], varied(dense(world), turn + 1));
  check_same_bits(cases()[index], varied(tiny(world), turn + 2));
}
