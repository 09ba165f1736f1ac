# SPDX-License-Identifier: Apache-2.0
# The library's targets. A target that needs what this machine lacks is not there: linking to it says so.
#
#   shardopt::shardopt   everything that needs no CUDA
#   shardopt::cuda       that, and the CUDA headers
#   shardopt::nccl       that, and NCCL
#   shardopt::checkpoint   shardopt::shardopt, and what <shardopt/checkpoint.hpp> needs: nlohmann-json, xxHash

# Who adds this folder to a project of their own must see the imported targets, too.
set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL ON)

find_package(Threads REQUIRED)
add_library(shardopt INTERFACE)
add_library(shardopt::shardopt ALIAS shardopt)
target_compile_features(shardopt INTERFACE cxx_std_20)
# CMake 3.25 knows no C++20 of nvcc 13 (cuda_std_20 is an error), so the flag itself.
target_compile_options(shardopt INTERFACE $<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA,Clang>:-std=c++20>)
target_include_directories(shardopt INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>)
target_link_libraries(shardopt INTERFACE Threads::Threads)

add_library(shardopt_checkpoint INTERFACE)
set_target_properties(shardopt_checkpoint PROPERTIES EXPORT_NAME checkpoint)
target_link_libraries(shardopt_checkpoint INTERFACE shardopt nlohmann_json::nlohmann_json xxHash::xxhash)
set(SHARDOPT_HAVE_CHECKPOINT OFF)
if(SHARDOPT_CHECKPOINT)
  find_package(nlohmann_json 3.11 QUIET)
  find_package(xxHash 0.8 QUIET)
endif()
if(SHARDOPT_CHECKPOINT AND nlohmann_json_FOUND AND xxHash_FOUND)
  set(SHARDOPT_HAVE_CHECKPOINT ON)
  add_library(shardopt::checkpoint ALIAS shardopt_checkpoint)
endif()

# The CUDA runtime itself comes with the language, static or shared as the property CUDA_RUNTIME_LIBRARY says:
# to name one here would put both into programs that chose the other.
add_library(shardopt_cuda INTERFACE)
set_target_properties(shardopt_cuda PROPERTIES EXPORT_NAME cuda)
target_link_libraries(shardopt_cuda INTERFACE shardopt CUDA::toolkit)

add_library(shardopt_nccl INTERFACE)
set_target_properties(shardopt_nccl PROPERTIES EXPORT_NAME nccl)
target_link_libraries(shardopt_nccl INTERFACE shardopt_cuda NCCL::nccl)

if(SHARDOPT_CUDA STREQUAL "OFF" OR NOT SHARDOPT_CUDA)
  set(SHARDOPT_HAVE_CUDA OFF)
else()
  include(${CMAKE_CURRENT_LIST_DIR}/find_cuda_toolkit.cmake)
  if(NOT CUDAToolkit_FOUND AND NOT SHARDOPT_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "SHARDOPT_CUDA is ON and there is no CUDA toolkit: set CUDAToolkit_ROOT, or SHARDOPT_CUDA=OFF")
  endif()
  set(SHARDOPT_HAVE_CUDA ${CUDAToolkit_FOUND})
endif()
set(SHARDOPT_HAVE_NCCL OFF)
if(SHARDOPT_HAVE_CUDA)
  add_library(shardopt::cuda ALIAS shardopt_cuda)
  find_package(NCCL QUIET)
  if(NCCL_FOUND)
    set(SHARDOPT_HAVE_NCCL ON)
    add_library(shardopt::nccl ALIAS shardopt_nccl)
  endif()
endif()
