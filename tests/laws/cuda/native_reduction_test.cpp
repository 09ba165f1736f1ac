// SPDX-License-Identifier: Apache-2.0
#include <laws/cuda/case_list.hpp>
#include <support/require_devices.hpp>

#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>

#include <memory>

namespace {

using namespace test;

/// The same work by one rank on the host that gets the reduced gradient handed.
Workload unsharded(Workload w, std::vector<std::vector<float>> reduced) {
  const int world = w.world;
  w.world = 1;
  w.reduction = so::Reduction::ordered;
  w.separate = false;
  const auto gradients = std::make_shared<std::vector<std::vector<float>>>(std::move(reduced));
  w.given_gradient = [gradients](int step, int, std::int64_t offset) {
    return (*gradients)[static_cast<std::size_t>(step)][static_cast<std::size_t>(offset)];
  };
  w.scaled_for = world;
  return w;
}

std::string differing_trainable(const Workload& w, const std::vector<std::byte>& a,
                                const std::vector<std::byte>& b, so::Dtype type) {
  const std::size_t size = so::size_of(type);
  const std::vector<Place> kinds = places(w);
  for (std::size_t k = 0; k < kinds.size(); ++k) {
    if (kinds[k] == Place::trainable && std::memcmp(a.data() + k * size, b.data() + k * size, size) != 0) {
      return "element " + std::to_string(k);
    }
  }
  return "";
}

}  // namespace

TEST_CASE("Sharded equals unsharded, bit for bit, given what NCCL reduced", "[laws][cuda][law1][law2]") {
  const std::size_t index = GENERATE(range(std::size_t{0}, cases().size(), std::size_t{3}));
  const int world = std::array<int, 3>{3, 4, 2}[index % 3];
  require_devices(world);
  Workload w = index % 2 == 0 ? awkward(world) : dense(world);
  w.reduction = so::Reduction::native;
  w.seed = 50 + index;
  w.separate = index % 4 == 3;
  const NamedCase& c = cases()[index];
  CAPTURE(c.name, w.name, world, w.separate);

  const Outcome sharded = c.on_nccl(w);
  CHECK(foreign_writes(w, sharded, c.types) == "");
  const Workload single = unsharded(w, reduced_gradients(w, sharded, c.types));
  const Outcome whole = c.on_host(single);
  for (std::size_t step = 0; step < sharded.front().results.size(); ++step) {
    CAPTURE(step);
    const so::StepResult& expected = whole.front().results[step];
    CHECK(expected.skipped ==
          (static_cast<int>(step) == w.infinite_step || static_cast<int>(step) == w.discarded_step));
    for (const RankOutcome& rank : sharded) {
      const so::StepResult& got = rank.results[step];
      CHECK(got.skipped == expected.skipped);
      CHECK(got.updates == expected.updates);
      CHECK((got.norm == expected.norm || (got.norm != got.norm && expected.norm != expected.norm)));
      CHECK(got.clip_factor == expected.clip_factor);
      CHECK_FALSE(got.inputs_differ);
      CHECK(differing_trainable(w, rank.parameters[step], whole.front().parameters[step],
                                c.types.parameter) == "");
    }
  }
  CHECK(whole_states(w, sharded) == whole_states(single, whole));
}
