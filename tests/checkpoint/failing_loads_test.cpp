// SPDX-License-Identifier: Apache-2.0
// Loads that fail on one rank behind the checks, or that ranks do not make together: every rank is told.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <support/small_checkpoint.hpp>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>

using namespace test;

namespace {

/// Copies to the device that this rank's thread can still make; negative: any number.
thread_local int uploads_left = -1;

/// The host, with copies to device memory that fail.
class FailingHost : public so::Host {
 public:
  void upload(void* to, const void* from, std::int64_t bytes, Stream stream) const {
    if (uploads_left == 0) throw so::Error("the copy has failed");
    if (uploads_left > 0) --uploads_left;
    Host::upload(to, from, bytes, stream);
  }
};

/// Ranks that are threads, each with such a device.
class OverFailingHost : public HostThreads {
 public:
  using Device = FailingHost;
  explicit OverFailingHost(HostThreads comm) : HostThreads(std::move(comm)) {}
  [[nodiscard]] FailingHost device() const { return {}; }
};
static_assert(so::Collective<OverFailingHost>);

using FailingAdam = so::ZeroOptimizer<so::AdamW, so::FlatSharding, OverFailingHost, so::FullPrecision>;

}  // namespace

TEST_CASE("A load whose copies to the device fail on one rank breaks every rank's optimizer",
          "[checkpoint][host][law9]") {
  constexpr int world = 3;
  const int bad = GENERATE(0, 2);
  const int copies = GENERATE(0, 1);
  CAPTURE(bad, copies);
  DurableFiles files(small_checkpoints(2, checkpoint_table()));
  const auto seen = on_ranks(world, [&](HostThreads comm) {
    CheckpointEngine<FailingAdam> engine(OverFailingHost(std::move(comm)));
    const bool here = engine.optimizer.rank() == bad;
    if (here) uploads_left = copies;
    const std::string told =
        message_of<so::Error>([&] { ckpt::load(engine.optimizer, small_directory, {.files = &files}, {}); });
    uploads_left = -1;
    const std::string later = message_of<so::Error>([&] { engine.optimizer.zero_gradients({}); });
    return std::tuple(told, later);
  });
  for (const auto& [told, later] : seen) {
    CAPTURE(told, later);
    CHECK(told.find("the copy has failed") != std::string::npos);
    CHECK(told.find("rank " + std::to_string(bad)) != std::string::npos);
    CHECK(told.find("the optimizer is broken") != std::string::npos);
    CHECK(later == told);
  }
}
