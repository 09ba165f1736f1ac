# SPDX-License-Identifier: Apache-2.0
# What ranks hand to each collective in one step, all of them together: in bytes of the calls' counts (for a reduce-scatter and
# an all-gather that is a rank's slice, so that the sum over ranks is the buffer, and (N-1)/N of it travel).
cmake_policy(VERSION 3.25)
include(${CMAKE_CURRENT_LIST_DIR}/counters.cmake)

foreach(name ReduceScatter AllGather Send Reduce Broadcast)
  collective(nccl${name} bytes bytes)
  if(NOT DEFINED ${name})
    set(${name} 0)
  endif()
  # The start compares digests: a few hundred bytes a rank in all-gathers.
  set(most ${${name}})
  if(name STREQUAL "AllGather")
    math(EXPR most "${most} + 4096")
  endif()
  require("nccl${name} moved ${bytes} bytes instead of ${${name}}" bytes GREATER_EQUAL ${name} AND bytes LESS_EQUAL most)
endforeach()

# The one all-reduce of a step carries sums and counts, never gradients.
collective(ncclAllReduce calls calls)
collective(ncclAllReduce bytes bytes)
math(EXPR most "${RANKS} * 1024")
require("there were ${calls} all-reduces" calls EQUAL RANKS)
require("the all-reduces moved ${bytes} bytes" bytes LESS_EQUAL most)
