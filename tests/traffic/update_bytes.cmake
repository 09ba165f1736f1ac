# SPDX-License-Identifier: Apache-2.0
# Law 10: the update moves BYTES bytes a parameter, each once, and its map. ELEMENTS parameters, one step, one rank.
cmake_policy(VERSION 3.25)
include(${CMAKE_CURRENT_LIST_DIR}/counters.cmake)

sum_of_kernels("update_kernel" launches launches)
foreach(direction load store)
  sum_of_kernels("update_kernel" unique_${direction}_bytes unique_${direction})
  sum_of_kernels("update_kernel" ${direction}_bytes all_${direction})
endforeach()
math(EXPR moved "${unique_load} + ${unique_store}")
math(EXPR least "${ELEMENTS} * ${BYTES}")
# A tile of 2048 elements is 32 bytes of the map; constants and verdict come with each launch.
math(EXPR most "${least} + ${least} / 100 + (${ELEMENTS} / 2048 + 4) * 32")
require("the update ran ${launches} times, not once a bucket" launches GREATER 1 AND launches LESS 10)
require("the update moved ${moved} bytes; expected ${least}" moved GREATER_EQUAL least)
require("the update moved ${moved} bytes; expected ${least} and a little" moved LESS_EQUAL most)
message("the update: ${moved} bytes, of ${least} at least; loaded ${all_load}, stored ${all_store}")
