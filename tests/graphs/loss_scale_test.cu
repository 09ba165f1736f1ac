// SPDX-License-Identifier: Apache-2.0
#include <shardopt/cuda.cuh>

#include <support/captured_graph.hpp>
#include <support/cuda_ranks.hpp>
#include <support/numbers.hpp>
#include <support/require_devices.hpp>

#include <cuda_fp16.h>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>

#include <array>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

using namespace test;

namespace {

using Fp16 = so::Mixed<so::fp16, so::fp16, float>;
template <class Comm>
using Optimizer = so::ZeroOptimizer<so::AdamW, so::FlatSharding, Comm, Fp16>;

constexpr std::int64_t extent = 3100;  // of both buffers; parameters lie in it with gaps

so::ParameterTable make_table() {
  so::ParameterTable table;
  table.add({.name = "a", .shape = {257, 3}, .offset = 5, .group = "decay"});
  table.add({.name = "none", .shape = {0}, .offset = 5, .group = "plain"});
  table.add({.name = "one", .shape = {1}, .offset = 779, .group = "plain"});
  table.add({.name = "b", .shape = {1021}, .offset = 800, .group = "plain"});
  table.add({.name = "c", .shape = {41, 29}, .offset = 1824, .group = "decay"});
  return table;
}

/// One step of the plan: what the largest element of one rank's gradient is before the loss is scaled, and
/// what must come of it. fp16 holds 100 at a scale of 512 and not at 1024, and 300 at neither, nor at 256.
struct Planned {
  float peak;
  float scale;  ///< of this step
  bool skipped = false;
  bool exhausted = false;
};

/// By the rule of Micikevicius et al. with `stepwise()`, worked out by hand.
constexpr auto plan = std::to_array<Planned>({
    {0, 1024},
    {100, 1024, true},  // the first of two overflows is forgiven
    {0, 1024},
    {100, 1024, true},
    {100, 512},
    {0, 512},
    {0, 512},           // the third good step in a row
    {100, 1024, true},  // forgiven again: growth has refilled the hysteresis
    {300, 1024, true},  // this one is not
    {300, 512, true},   // nor those that follow at once
    {300, 256, true, true},
    {0, 256},
    {300, 256, true, true},
    {0, 256},
    {100, 256},
    {0, 256},
    {300, 512, true},
    {0, 512},
    {0, 512},
    {0, 512},
    {0, 1024},
});

so::DynamicLossScale stepwise() {
  return {.initial = 1024, .growth_interval = 3, .hysteresis = 2, .minimum = 256};
}

/// Scales that are no powers of two, so that dividing by them rounds.
so::DynamicLossScale uneven() {
  return {.initial = 1000,
          .growth_factor = 1.7f,
          .backoff_factor = 0.3f,
          .growth_interval = 2,
          .hysteresis = 1,
          .minimum = 11};
}

struct Run {
  int world;
  so::DynamicLossScale scale;
  so::Reduction reduction = so::Reduction::ordered;
  int replays_of_three = 0;  ///< how many of three steps replay a graph

  [[nodiscard]] bool replayed(std::size_t step) const {
    return static_cast<int>(step % 3) < replays_of_three;
  }
};

template <class Comm>
typename Optimizer<Comm>::Config config_of(const Run& run) {
  return {.groups = {{"decay", {.lr = 1e-2, .beta1 = 0.8, .weight_decay = 0.1}}, {"plain", {.lr = 3e-2}}},
          .sharding = {.bucket_bytes = 1024},
          .reduction = run.reduction,
          .max_norm = 20.0f,
          .loss_scale = run.scale};
}

float factor_of(std::size_t step) { return 1.0f / static_cast<float>(1 + step % 4); }

/// The gradient before the loss is scaled: noise within 1, and the peak on a rank that takes turns.
std::vector<float> unscaled(int world, int rank, std::size_t step) {
  std::vector<float> result(extent);
  for (std::size_t k = 0; k < result.size(); ++k)
    result[k] = 0.001f * (static_cast<float>(noise(rank, step, k) % 2001) - 1000.0f);
  if (static_cast<int>(step) % world == rank && plan[step].peak > 0)
    result[800 + step * 37] = plan[step].peak;
  return result;
}

/// What a step left behind on one rank.
struct Seen {
  std::string error;  ///< of the ticket
  so::StepResult result;
  so::StepCounters counters;
  std::vector<so::fp16> parameters;
};
using History = std::vector<Seen>;

void collect(const so::StepTicket& ticket, Seen& seen) {
  try {
    seen.result = ticket.get();
  } catch (const so::Error& error) {
    seen.error = error.what();
  }
}

/// One rank on the host.
History train_on_host(const Run& run, so::Threads<so::Host> comm) {
  std::vector<so::fp16> parameters(extent, rounded<so::fp16>(0.5));
  std::vector<so::fp16> gradients(extent);
  const int rank = comm.rank();
  Optimizer<so::Threads<so::Host>> optimizer(make_table(), config_of<so::Threads<so::Host>>(run),
                                             std::move(comm),
                                             so::FlatBuffers{parameters.data(), gradients.data()}, {});
  History history(plan.size());
  for (std::size_t step = 0; step < plan.size(); ++step) {
    const std::vector<float> from = unscaled(run.world, rank, step);
    for (std::size_t k = 0; k < from.size(); ++k)
      gradients[k] = rounded<so::fp16>(static_cast<double>(from[k] * *optimizer.loss_scale()));
    const float scale = 1.0f / static_cast<float>(run.world);
    collect(optimizer.step({.lr_factor = factor_of(step), .gradient_scale = scale}, {}), history[step]);
    history[step].counters = optimizer.counters({});
    history[step].parameters = parameters;
  }
  return history;
}

/// The end of a backward pass whose loss was scaled by what lies in device memory.
__global__ void scale_gradient(__half* to, const float* from, const float* loss_scale) {
  for (std::int64_t k = threadIdx.x; k < extent; k += blockDim.x)
    to[k] = __float2half_rn(__fmul_rn(from[k], *loss_scale));
}

/// One rank on its GPU.
History train_on_gpu(const Run& run, int rank, ncclComm_t comm) {
  const OwnStream stream;
  const OwnStream communication;
  const OwnMemory<so::fp16> parameters(extent);
  const OwnMemory<so::fp16> gradients(extent);
  const OwnMemory<float> from(extent);
  parameters.write(std::vector<so::fp16>(extent, rounded<so::fp16>(0.5)), stream);
  Optimizer<so::Nccl> optimizer(make_table(), config_of<so::Nccl>(run), so::Nccl::borrow(comm, communication),
                                so::FlatBuffers{parameters.data(), gradients.data()}, stream);
  const auto backward = [&] {
    scale_gradient<<<1, 256, 0, stream>>>(reinterpret_cast<__half*>(gradients.data()), from.data(),
                                          optimizer.loss_scale());
    succeed(cudaGetLastError());
  };
  std::optional<CapturedGraph> graph;
  if (run.replays_of_three > 0) {
    graph.emplace(stream, [&] {
      backward();
      static_cast<void>(optimizer.step({}, stream));
    });
  }
  History history(plan.size());
  for (std::size_t step = 0; step < plan.size(); ++step) {
    from.write(unscaled(run.world, rank, step), stream);
    const float scale = 1.0f / static_cast<float>(run.world);
    if (run.replayed(step)) {
      optimizer.set_inputs(factor_of(step), scale, stream);
      graph->replay(stream);
      collect(optimizer.last_result(stream), history[step]);
    } else {
      backward();
      collect(optimizer.step({.lr_factor = factor_of(step), .gradient_scale = scale}, stream), history[step]);
    }
    history[step].counters = optimizer.counters(stream);
    optimizer.wait_parameters(stream);
    history[step].parameters = parameters.read(stream);
  }
  return history;
}

std::vector<History> on_host(const Run& run) {
  std::vector<History> histories(static_cast<std::size_t>(run.world));
  so::Threads<so::Host>::run(run.world, [&](so::Threads<so::Host> comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    histories[rank] = train_on_host(run, std::move(comm));
  });
  return histories;
}

std::vector<History> on_gpus(const Run& run) {
  std::vector<History> histories(static_cast<std::size_t>(run.world));
  const Communicators comms(run.world);
  on_ranks(run.world, [&](int rank) {
    histories[static_cast<std::size_t>(rank)] = train_on_gpu(run, rank, comms[rank]);
  });
  return histories;
}

std::string text_of(const Seen& seen) {
  const so::StepResult& r = seen.result;
  const so::StepCounters& c = seen.counters;
  std::ostringstream text;
  text << std::hexfloat << seen.error << "|iteration " << r.iteration << ", updates " << r.updates
       << ", norm " << r.norm << ", non-finite " << r.non_finite << ", clip factor " << r.clip_factor
       << ", loss scale " << r.loss_scale << (r.skipped ? ", skipped" : "")
       << (r.inputs_differ ? ", inputs differ" : "") << "|iteration " << c.iteration << ", updates "
       << c.updates << ", loss scale " << c.loss_scale << ", hysteresis " << c.loss_scale_hysteresis
       << ", good steps " << c.loss_scale_good_steps;
  return text.str();
}

void check_same(const std::vector<History>& expected, const std::vector<History>& got) {
  for (std::size_t rank = 0; rank < expected.size(); ++rank) {
    for (std::size_t step = 0; step < plan.size(); ++step) {
      CAPTURE(rank, step);
      CHECK(text_of(got[rank][step]) == text_of(expected[rank][step]));
      CHECK(got[rank][step].parameters == expected[rank][step].parameters);
    }
  }
}

/// Whether the scale went the way that was worked out by hand.
void check_planned(const std::vector<History>& histories) {
  for (const History& history : histories) {
    std::int64_t updates = 0;
    for (std::size_t step = 0; step < plan.size(); ++step) {
      CAPTURE(step);
      const Planned& planned = plan[step];
      const Seen& seen = history[step];
      updates += planned.skipped ? 0 : 1;
      CHECK(seen.counters.iteration == static_cast<std::int64_t>(step) + 1);
      CHECK(seen.counters.updates == updates);
      if (step + 1 < plan.size()) CHECK(seen.counters.loss_scale == plan[step + 1].scale);
      if (planned.exhausted) {
        CHECK(seen.error ==
              "shardopt: the gradient is not finite at the smallest loss scale, 256.000000 (iteration " +
                  std::to_string(step + 1) + ")");
      } else {
        CHECK(seen.error == "");
        CHECK(seen.result.loss_scale == planned.scale);
        CHECK(seen.result.skipped == planned.skipped);
        CHECK(seen.result.non_finite == (planned.skipped ? 1 : 0));
      }
      const bool moved = step == 0 || seen.parameters != history[step - 1].parameters;
      CHECK(moved == !planned.skipped);
    }
  }
}

}  // namespace

TEST_CASE("The loss scale and the parameters of fp16 gradients go the same way on GPUs as on the host",
          "[zero][cuda][law3][law7][B045]") {
  const int world = GENERATE(2, 3, 4);
  const bool by_hand = GENERATE(true, false);
  CAPTURE(world, by_hand);
  require_devices(world);
  const Run run{.world = world, .scale = by_hand ? stepwise() : uneven()};
  const auto host = on_host(run);
  const auto gpus = on_gpus(run);
  check_same(host, gpus);
  if (by_hand) check_planned(gpus);
  CHECK(gpus.front().back().counters.updates < 18);  // overflows were among the uneven scales, too
}

TEST_CASE("Replays in which gradients overflow move the loss scale as uncaptured steps do, bit for bit",
          "[zero][cuda][law7][B078]") {
  const int world = GENERATE(2, 3, 4);
  const int replays_of_three = GENERATE(3, 2);  // all, or with uncaptured steps between them
  const so::Reduction reduction = GENERATE(so::Reduction::native, so::Reduction::ordered);
  const bool by_hand = GENERATE(true, false);
  CAPTURE(world, replays_of_three, so::name_of(reduction), by_hand);
  require_devices(world);
  Run run{.world = world, .scale = by_hand ? stepwise() : uneven(), .reduction = reduction};
  const auto uncaptured = on_gpus(run);
  run.replays_of_three = replays_of_three;
  const auto replayed = on_gpus(run);
  check_same(uncaptured, replayed);
  if (by_hand) check_planned(replayed);
}
