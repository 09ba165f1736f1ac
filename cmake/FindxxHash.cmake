# SPDX-License-Identifier: Apache-2.0
# Finds the header of xxHash (0.8 or newer), which is all that is needed: its functions are compiled into who includes it.
# Uses xxHash's own package configuration where there is one. Defines xxHash::xxhash, xxHash_FOUND and xxHash_VERSION.

find_package(xxHash CONFIG QUIET)
if(xxHash_FOUND AND TARGET xxHash::xxhash)
  return()
endif()

find_path(xxHash_INCLUDE_DIR xxhash.h)
mark_as_advanced(xxHash_INCLUDE_DIR)
set(xxHash_VERSION)
if(xxHash_INCLUDE_DIR)
  foreach(part IN ITEMS MAJOR MINOR RELEASE)
    file(STRINGS "${xxHash_INCLUDE_DIR}/xxhash.h" line REGEX "^#define XXH_VERSION_${part} +[0-9]+")
    string(REGEX REPLACE "^#define XXH_VERSION_${part} +([0-9]+).*" "\\1" number "${line}")
    list(APPEND xxHash_VERSION ${number})
  endforeach()
  list(JOIN xxHash_VERSION "." xxHash_VERSION)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(xxHash REQUIRED_VARS xxHash_INCLUDE_DIR VERSION_VAR xxHash_VERSION
                                  REASON_FAILURE_MESSAGE "set xxHash_ROOT to the folder that holds include/xxhash.h")

if(xxHash_FOUND AND NOT TARGET xxHash::xxhash)
  if(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL)
    add_library(xxHash::xxhash INTERFACE IMPORTED GLOBAL)
  else()
    add_library(xxHash::xxhash INTERFACE IMPORTED)
  endif()
  target_include_directories(xxHash::xxhash INTERFACE "${xxHash_INCLUDE_DIR}")
endif()
