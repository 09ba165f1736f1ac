# SPDX-License-Identifier: Apache-2.0
# Finds NCCL: its own package configuration where there is one, else header and library.
# Looks in NCCL_ROOT (variable or environment), beside the CUDA toolkit (CUDAToolkit_ROOT) and in the system's folders.
# Defines NCCL::nccl, NCCL_FOUND, NCCL_VERSION, NCCL_INCLUDE_DIR and NCCL_LIBRARY.

find_package(NCCL CONFIG QUIET)
if(NCCL_FOUND)
  if(NOT TARGET NCCL::nccl)
    foreach(name IN ITEMS NCCL::NCCL nccl::nccl nccl)
      if(TARGET ${name})
        add_library(NCCL::nccl INTERFACE IMPORTED)
        target_link_libraries(NCCL::nccl INTERFACE ${name})
        break()
      endif()
    endforeach()
  endif()
  if(TARGET NCCL::nccl)
    return()
  endif()
endif()

set(nccl_hints ${CUDAToolkit_ROOT} $ENV{CUDAToolkit_ROOT} ${CUDAToolkit_TARGET_DIR} ${CUDAToolkit_LIBRARY_ROOT} $ENV{CUDA_HOME} $ENV{CUDA_PATH})
list(TRANSFORM nccl_hints APPEND "/../nccl" OUTPUT_VARIABLE nccl_neighbours) # the layout of the Python wheels
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${nccl_hints} ${nccl_neighbours} PATH_SUFFIXES include)
# The wheels and many images hold the library by its versioned name alone.
find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ${nccl_hints} ${nccl_neighbours} PATH_SUFFIXES lib lib64 lib/x64)
mark_as_advanced(NCCL_INCLUDE_DIR NCCL_LIBRARY)

include(${CMAKE_CURRENT_LIST_DIR}/shardopt_find.cmake)
shardopt_header_version(NCCL_VERSION "${NCCL_INCLUDE_DIR}/nccl.h" NCCL MAJOR MINOR PATCH)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  NCCL REQUIRED_VARS NCCL_LIBRARY NCCL_INCLUDE_DIR VERSION_VAR NCCL_VERSION
  REASON_FAILURE_MESSAGE "set NCCL_ROOT to the folder that holds include/nccl.h and lib/libnccl.so.2")

if(NCCL_FOUND AND NOT TARGET NCCL::nccl)
  shardopt_imported_library(NCCL::nccl UNKNOWN)
  set_target_properties(NCCL::nccl PROPERTIES IMPORTED_LOCATION "${NCCL_LIBRARY}"
                                              INTERFACE_INCLUDE_DIRECTORIES "${NCCL_INCLUDE_DIR}")
endif()
