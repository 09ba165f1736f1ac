# SPDX-License-Identifier: Apache-2.0
# LAUNCHES launches of KERNEL moved BYTES bytes for each of ELEMENTS elements, and little beside; in whole 32-byte sectors.
include(${CMAKE_CURRENT_LIST_DIR}/../traffic/counters.cmake)

set(moved 0)
foreach(direction IN ITEMS load store)
  sum_of_kernels(${KERNEL} unique_${direction}_bytes ${direction}_bytes)
  sum_of_kernels(${KERNEL} ${direction}_sectors ${direction}_sectors)
  math(EXPR moved "${moved} + ${${direction}_bytes}")
endforeach()
sum_of_kernels(${KERNEL} launches launches)
math(EXPR least "${LAUNCHES} * ${ELEMENTS} * ${BYTES}")
# Beside the elements: 32 bytes of map a tile of 2048, and constants, verdict and limbs with each launch.
math(EXPR most "${least} + ${LAUNCHES} * ((${ELEMENTS} / 2048) * 32 + 512)")
require("${launches} launches" launches EQUAL LAUNCHES)
require("${moved} bytes were moved; ${least} are declared" moved GREATER_EQUAL least AND moved LESS_EQUAL most)

# Sectors that are stored are full. Each warp of eight a tile loads map, constants and verdict beside its elements, a sector each.
math(EXPR full "${store_bytes} / 32")
math(EXPR most "${load_bytes} / 32 + ${LAUNCHES} * (${ELEMENTS} / 2048) * 8 * 20")
require("${store_sectors} sectors were stored; ${full} full ones would do" store_sectors EQUAL full)
require("${load_sectors} sectors were loaded; ${most} would do" load_sectors LESS_EQUAL most)
message("${KERNEL}: ${moved} bytes, of ${least} declared; ${load_sectors} sectors of 32 bytes loaded, ${store_sectors} stored")
