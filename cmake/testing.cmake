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

# What nearly every test includes, parsed once: a fifth of the time to compile them. Each still includes what it uses.
file(CONFIGURE OUTPUT test_headers.cpp CONTENT "// Only for its precompiled headers.\n")
add_library(test_headers OBJECT ${CMAKE_CURRENT_BINARY_DIR}/test_headers.cpp)
target_link_libraries(test_headers PRIVATE shardopt::checkpoint shardopt_warnings Catch2::Catch2)
target_precompile_headers(test_headers PRIVATE <catch2/catch_test_macros.hpp> <catch2/generators/catch_generators.hpp>
                                               <shardopt/shardopt.hpp> <nlohmann/json.hpp> <filesystem> <map> <thread>)

# The prefix of each test that needs a GPU: decides when the test runs whether and where it can.
set(SHARDOPT_ON_GPU ${PROJECT_SOURCE_DIR}/cmake/on_gpu.sh)

# What a sanitizer has nothing to say about need not be built for it.
set(SHARDOPT_TEST_FILES "." CACHE STRING "Only test files that match this regular expression are built")
mark_as_advanced(SHARDOPT_TEST_FILES)

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
  list(FILTER arg_SOURCES INCLUDE REGEX "${SHARDOPT_TEST_FILES}")
  if(NOT arg_SOURCES)
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
  if(NOT arg_CUDA)
    target_precompile_headers(${target} REUSE_FROM test_headers)
    # What files instantiate alike is compiled once for several: less than half of the time. CMAKE_UNITY_BUILD decides.
    set(unity ON)
    if(DEFINED CMAKE_UNITY_BUILD)
      set(unity ${CMAKE_UNITY_BUILD})
    endif()
    set_target_properties(${target} PROPERTIES UNITY_BUILD ${unity} UNITY_BUILD_BATCH_SIZE 7)
  endif()
  target_link_libraries(${target} PRIVATE ${library} shardopt::checkpoint shardopt_warnings ${arg_LIBRARIES} Catch2::Catch2WithMain)
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

# shardopt_add_counted_test(NAME name PROGRAM name CASE "test case" CHECK script.cmake [DEFINITIONS -DX=1...] [LABELS quick|full])
#
# Runs a test case of a CUDA program made by shardopt_add_test, which may be hidden ([.]), with SHARDOPT_TEST_COUNTERS,
# then includes the script with the text of the counters in the variable `counters`; the script ends with FATAL_ERROR
# where they are wrong. Skipped where no launcher writes counters.
function(shardopt_add_counted_test)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "NAME;PROGRAM;CASE;CHECK;LABELS" "DEFINITIONS")
  if(NOT TARGET test_${arg_PROGRAM})
    return()
  endif()
  if(NOT arg_LABELS)
    set(arg_LABELS quick)
  endif()
  cmake_path(ABSOLUTE_PATH arg_CHECK)
  add_test(NAME ${arg_NAME} COMMAND ${CMAKE_COMMAND} -DLAUNCHER=${SHARDOPT_ON_GPU} -DPROGRAM=$<TARGET_FILE:test_${arg_PROGRAM}>
                                    -DCASE=${arg_CASE} -DCHECK=${arg_CHECK} ${arg_DEFINITIONS} -P ${PROJECT_SOURCE_DIR}/cmake/counted_test.cmake)
  set_tests_properties(${arg_NAME} PROPERTIES LABELS ${arg_LABELS} SKIP_REGULAR_EXPRESSION "skipped: " TIMEOUT 600)
endfunction()

# Each tests/compile_fail/X.cpp or .cu must be refused, with the text of its lines `// expect: TEXT`.
function(shardopt_add_compile_fail_tests)
  file(GLOB sources CONFIGURE_DEPENDS compile_fail/*.cpp compile_fail/*.cu)
  foreach(source IN LISTS sources)
    cmake_path(GET source FILENAME name)
    set(compiler ${CMAKE_CXX_COMPILER} -fsyntax-only)
    if(name MATCHES "\\.cu$")
      if(NOT SHARDOPT_HAVE_CUDA)
        continue()
      endif()
      set(compiler ${CMAKE_CUDA_COMPILER} --cuda -o /dev/null)
    endif()
    list(JOIN compiler "|" compiler)
    add_test(NAME "compile_fail:${name}" COMMAND ${CMAKE_COMMAND} -DCOMPILER=${compiler} -DSOURCE=${source}
                                                 -DINCLUDE=${PROJECT_SOURCE_DIR}/include -P ${PROJECT_SOURCE_DIR}/cmake/compile_fail_test.cmake)
    set_tests_properties("compile_fail:${name}" PROPERTIES LABELS quick)
  endforeach()
endfunction()
