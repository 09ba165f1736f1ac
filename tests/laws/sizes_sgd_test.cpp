// SPDX-License-Identifier: Apache-2.0
// Laws 1, 2, 5 and 7 for one rule: the other pairs of policies and precisions, single tensors, a world
// without company.
#include <laws/law_suite.hpp>
#include <support/host_world.hpp>

using namespace test;

TEMPLATE_LIST_TEST_CASE("SGD leaves the bits of a plain loop under further policies and precisions",
                        "[laws][law1][law2][law5][law7][host]", MoreCombinations) {
  const int world = GENERATE(1, 3, 4);
  require_laws<ThreadsWorld, so::SGD, TestType>(world, world + 1);
}

TEMPLATE_LIST_TEST_CASE("SGD leaves the bits of a plain loop for tensors of every awkward size",
                        "[laws][law1][law2][law5][law7][host]", MoreCombinations) {
  const int world = GENERATE(2, 5);
  require_laws_of_sizes<ThreadsWorld, so::SGD, TestType>(world);
}

TEMPLATE_LIST_TEST_CASE("SGD leaves the bits of a plain loop for every awkward size and world",
                        "[laws][law1][law2][law5][law7][host][full]", MoreCombinations) {
  const int world = GENERATE(range(1, 9));
  require_laws_of_sizes<ThreadsWorld, so::SGD, TestType>(world);
  require_laws<ThreadsWorld, so::SGD, TestType>(world, world + 2);
}

TEST_CASE("SGD on one rank without company leaves the bits of a plain loop", "[laws][law1][host]") {
  require_laws<SoloWorld, so::SGD, Combination<so::FlatSharding, Fp32>>(1, GENERATE(range(0, 6)));
}
