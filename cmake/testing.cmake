# SPDX-License-Identifier: Apache-2.0
# Catch2, and shardopt_add_test().

find_package(Catch2 3 QUIET)
if(NOT Catch2_FOUND)
  message(STATUS "Catch2 3 is not installed: fetching 3.7.1")
  include(FetchContent)
  FetchContent_Declare(Catch2 GIT_REPOSITORY https://github.com/catchorg/Catch2.git GIT_TAG v3.7.1 GIT_SHALLOW ON SYSTEM)
  FetchContent_MakeAvailable(Catch2)
  list(APPEND CMAKE_MODULE_PATH ${catch2_SOURCE_DIR}/extras)
endif()
include(Catch)

# The prefix of each test that needs a GPU: decides when the test runs whether and where it can.
set(SHARDOPT_ON_GPU ${PROJECT_SOURCE_DIR}/cmake/on_gpu.sh)

# shardopt_add_test(NAME name SOURCES files... [CUDA] [LABELS quick|full] [LIBRARIES targets...] [TIMEOUT seconds])
#
# A Catch2 program, each of its test cases a test of CTest called "name: test case". Without LABELS the cases tagged
# [full] get the label full, all others quick. CUDA: runs on the GPU or through the launcher, and is skipped, with the
# reason, where there is neither.
function(shardopt_add_test)
  cmake_parse_arguments(PARSE_ARGV 0 arg "CUDA" "NAME;TIMEOUT" "SOURCES;LABELS;LIBRARIES")
  if(NOT arg_NAME OR NOT arg_SOURCES OR arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "shardopt_add_test: NAME and SOURCES are needed; unknown: '${arg_UNPARSED_ARGUMENTS}'")
  endif()
  if(arg_CUDA AND NOT SHARDOPT_HAVE_CUDA)
    return()
  endif()
  set(target test_${arg_NAME})
  add_executable(${target} ${arg_SOURCES})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  set(library shardopt::shardopt)
  set(discovery)
  if(arg_CUDA)
    set(library shardopt::cuda)
    if(SHARDOPT_HAVE_NCCL)
      set(library shardopt::nccl)
    endif()
    set_property(TARGET ${target} PROPERTY CROSSCOMPILING_EMULATOR ${SHARDOPT_ON_GPU})
    set(discovery DL_PATHS ${CUDAToolkit_LIBRARY_DIR})
  endif()
  target_link_libraries(${target} PRIVATE ${library} shardopt_warnings ${arg_LIBRARIES} Catch2::Catch2WithMain)
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 600)
  endif()

  if(arg_LABELS)
    catch_discover_tests(${target} TEST_PREFIX "${arg_NAME}: " ${discovery} PROPERTIES LABELS ${arg_LABELS} TIMEOUT ${arg_TIMEOUT})
  else()
    catch_discover_tests(${target} TEST_SPEC "~[full]~[.]" TEST_PREFIX "${arg_NAME}: " ${discovery}
                         PROPERTIES LABELS quick TIMEOUT ${arg_TIMEOUT})
    catch_discover_tests(${target} TEST_SPEC "[full]" TEST_PREFIX "${arg_NAME}: " ${discovery}
                         PROPERTIES LABELS full TIMEOUT 3600)
  endif()
endfunction()
