# SPDX-License-Identifier: Apache-2.0
# LAUNCHES launches of KERNEL moved BYTES bytes for each of ELEMENTS elements, and little beside; in whole 32-byte sectors.
include(${CMAKE_CURRENT_LIST_DIR}/../traffic/counters.cmake)

set(moved 0)
set(sectors 0)
foreach(direction IN ITEMS load store)
  sum_of_kernels(${KERNEL} unique_${direction}_bytes bytes)
  math(EXPR moved "${moved} + ${bytes}")
  sum_of_kernels(${KERNEL} ${direction}_sectors count)
  math(EXPR sectors "${sectors} + ${count}")
endforeach()
sum_of_kernels(${KERNEL} launches launches)
math(EXPR least "${LAUNCHES} * ${ELEMENTS} * ${BYTES}")
# Beside the elements: 32 bytes of map a tile of 2048, and constants, verdict and limbs with each launch.
math(EXPR most "${least} + ${LAUNCHES} * ((${ELEMENTS} / 2048) * 32 + 512)")
require("${launches} launches" launches EQUAL LAUNCHES)
require("${moved} bytes were moved; ${least} are declared" moved GREATER_EQUAL least AND moved LESS_EQUAL most)
message("${KERNEL}: ${moved} bytes, of ${least} declared; ${sectors} sectors of 32 bytes")
