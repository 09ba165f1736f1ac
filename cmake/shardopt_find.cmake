# SPDX-License-Identifier: Apache-2.0
# What the find modules beside it share.

# shardopt_header_version(VARIABLE HEADER PREFIX PARTS...): "2.28.9" of `#define PREFIX_PART number` lines; empty if there
# is no such header.
function(shardopt_header_version variable header prefix)
  set(version)
  if(EXISTS "${header}")
    foreach(part IN LISTS ARGN)
      file(STRINGS "${header}" line REGEX "^#define ${prefix}_${part} +[0-9]+")
      string(REGEX REPLACE "^#define ${prefix}_${part} +([0-9]+).*" "\\1" number "${line}")
      list(APPEND version ${number})
    endforeach()
    list(JOIN version "." version)
  endif()
  set(${variable} "${version}" PARENT_SCOPE)
endfunction()

# shardopt_imported_library(NAME KIND): an imported library, global where the including project asks for that.
function(shardopt_imported_library name kind)
  if(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL)
    add_library(${name} ${kind} IMPORTED GLOBAL)
  else()
    add_library(${name} ${kind} IMPORTED)
  endif()
endfunction()
