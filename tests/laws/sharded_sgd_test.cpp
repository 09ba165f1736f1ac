// SPDX-License-Identifier: Apache-2.0
// Laws 1, 2, 5 and 7 for one rule.
#include <laws/law_suite.hpp>
#include <support/host_world.hpp>

using namespace test;

TEMPLATE_LIST_TEST_CASE("SGD sharded over ranks leaves the bits of a plain loop",
                        "[laws][law1][law2][law5][law7][host]", Combinations) {
  const int world = GENERATE(range(1, 9));
  require_laws<ThreadsWorld, so::SGD, TestType>(world, world);
}

TEMPLATE_LIST_TEST_CASE("SGD sharded over ranks leaves the bits of a plain loop, in all variations",
                        "[laws][law1][law2][law5][law7][host][full]", Combinations) {
  const int world = GENERATE(range(1, 9));
  const int variation = GENERATE(range(0, 12));
  require_laws<ThreadsWorld, so::SGD, TestType>(world, variation);
}
