# SPDX-License-Identifier: Apache-2.0
# Finds the header of xxHash (0.8 or newer), which is all that is needed: its functions are compiled into who includes it.
# Uses xxHash's own package configuration where there is one. Defines xxHash::xxhash, xxHash_FOUND and xxHash_VERSION.

find_package(xxHash CONFIG QUIET)
if(xxHash_FOUND AND TARGET xxHash::xxhash)
  return()
endif()

find_path(xxHash_INCLUDE_DIR xxhash.h)
mark_as_advanced(xxHash_INCLUDE_DIR)
include(${CMAKE_CURRENT_LIST_DIR}/shardopt_find.cmake)
shardopt_header_version(xxHash_VERSION "${xxHash_INCLUDE_DIR}/xxhash.h" XXH_VERSION MAJOR MINOR RELEASE)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(xxHash REQUIRED_VARS xxHash_INCLUDE_DIR VERSION_VAR xxHash_VERSION
                                  REASON_FAILURE_MESSAGE "set xxHash_ROOT to the folder that holds include/xxhash.h")

if(xxHash_FOUND AND NOT TARGET xxHash::xxhash)
  shardopt_imported_library(xxHash::xxhash INTERFACE)
  target_include_directories(xxHash::xxhash INTERFACE "${xxHash_INCLUDE_DIR}")
endif()
