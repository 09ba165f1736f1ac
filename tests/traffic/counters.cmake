# SPDX-License-Identifier: Apache-2.0
# Reads the counters of tests/README.md in the variable `counters`.

# sum_of_kernels(PATTERN KEY RESULT): over the kernels whose name matches.
function(sum_of_kernels pattern key result)
  string(JSON count LENGTH "${counters}" kernels)
  set(sum 0)
  if(count GREATER 0)
    math(EXPR last "${count} - 1")
    foreach(index RANGE ${last})
      string(JSON name MEMBER "${counters}" kernels ${index})
      if(name MATCHES "${pattern}")
        string(JSON value GET "${counters}" kernels "${name}" ${key})
        math(EXPR sum "${sum} + ${value}")
      endif()
    endforeach()
  endif()
  set(${result} ${sum} PARENT_SCOPE)
endfunction()

# collective(NAME KEY RESULT): 0 where it was not called.
function(collective name key result)
  string(JSON value ERROR_VARIABLE missing GET "${counters}" collectives ${name} ${key})
  if(missing)
    set(value 0)
  endif()
  set(${result} ${value} PARENT_SCOPE)
endfunction()

# require(CONDITION... MESSAGE text)
macro(require message)
  if(NOT (${ARGN}))
    string(JSON kernels GET "${counters}" kernels)
    string(JSON collectives GET "${counters}" collectives)
    message(FATAL_ERROR "${message}\nkernels: ${kernels}\ncollectives: ${collectives}")
  endif()
endmacro()
