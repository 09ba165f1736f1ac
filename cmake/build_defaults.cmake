# SPDX-License-Identifier: Apache-2.0
# What the project's own programs (tests, examples, benchmarks) are built with. Nothing of it is exported.

if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release, RelWithDebInfo or MinSizeRel" FORCE)
endif()

if(SHARDOPT_HAVE_CUDA)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
  elseif(SHARDOPT_CUDA STREQUAL "AUTO")
    set(SHARDOPT_HAVE_CUDA OFF)
  else()
    message(FATAL_ERROR "SHARDOPT_CUDA is ON and there is no CUDA compiler: set CUDACXX, or SHARDOPT_CUDA=OFF")
  endif()
endif()
if(PROJECT_IS_TOP_LEVEL)
  message(STATUS "shardopt ${PROJECT_VERSION}: CUDA ${SHARDOPT_HAVE_CUDA}, NCCL ${SHARDOPT_HAVE_NCCL}")
endif()

# Warnings are errors, for what is built here.
add_library(shardopt_warnings INTERFACE)
set(SHARDOPT_CXX_WARNINGS -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wold-style-cast -Werror)
set(SHARDOPT_NVCC_WARNINGS --Werror=all-warnings,cross-execution-space-call -Xcompiler=-Wall,-Wextra,-Wshadow,-Werror)
target_compile_options(
  shardopt_warnings INTERFACE "$<$<COMPILE_LANG_AND_ID:CXX,GNU,Clang>:${SHARDOPT_CXX_WARNINGS}>"
                              "$<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>:${SHARDOPT_NVCC_WARNINGS}>")
