// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch_test_macros.hpp>
#include <shardopt/collectives/solo.hpp>
#include <shardopt/devices/host.hpp>

#include <cstdint>
#include <span>
#include <vector>

namespace so = shardopt;

TEST_CASE("A world of one rank has nothing to send, and leaves everything as it is", "[collectives][host]") {
  so::Solo<so::Host> solo;
  CHECK(solo.rank() == 0);
  CHECK(solo.world() == 1);
  const std::vector<std::int64_t> borders{0, 4};
  std::vector<std::int64_t> words{1, 2, 3, 4};
  solo.reduce_scatter(words.data(), {borders}, so::Dtype::fp32, so::Reduction::ordered, nullptr);
  solo.all_gather(words.data(), {borders}, so::Dtype::fp32);
  solo.all_reduce(words.data(), 4);
  solo.broadcast(words.data(), 32, 0);
  std::vector<std::int64_t> all(4);
  solo.exchange(std::as_bytes(std::span(words)), std::as_writable_bytes(std::span(all)), nullptr);
  CHECK(words == std::vector<std::int64_t>{1, 2, 3, 4});
  CHECK(all == words);
  CHECK(so::Solo<so::Host>::supports(so::Reduction::native, so::Dtype::fp32));
}
