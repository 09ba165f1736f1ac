# SPDX-License-Identifier: Apache-2.0
# find_package(CUDAToolkit), quietly. CMake 3.25.1's own module ends with an error for toolkits without nvToolsExt (all
# from CUDA 13 on) where the project asks for CMake 3.25; it looks at this variable alone.
set(shardopt_minimum "${CMAKE_MINIMUM_REQUIRED_VERSION}")
set(CMAKE_MINIMUM_REQUIRED_VERSION 3.24)
find_package(CUDAToolkit QUIET)
set(CMAKE_MINIMUM_REQUIRED_VERSION "${shardopt_minimum}")
unset(shardopt_minimum)
