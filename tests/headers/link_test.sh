#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# link_test.sh SOURCES BUILD host|cuda|rdc COMPILER FLAGS...: one program of all translation units, and one of two shared
# libraries; both link without a word, run, and print the same. Reads CXXFLAGS, NVCC, NVCCFLAGS, NCCL_INCLUDE, NCCL_LIBRARY, ON_GPU.
set -euo pipefail
sources=$1 kind=$3 compiler=$4
build=$(mkdir -p "$2" && mktemp -d "$2/XXXXXX")
shift 4
trap 'rm -rf "$build"' EXIT
read -ra cxxflags <<<"$CXXFLAGS"
cxxflags+=("$@")
runner=()
link=("$compiler" "${cxxflags[@]}" -Wl,--fatal-warnings)
for unit in a b main; do
  defines=()
  [ "$kind" = host ] || defines=(-DWITH_CUDA)
  "$compiler" "${cxxflags[@]}" "${defines[@]}" -fPIC -c "$sources/$unit.cpp" -o "$build/$unit.o"
done
units_1=("$build/a.o") units_2=("$build/b.o")
libraries=()
if [ "$kind" != host ]; then
  read -ra nvccflags <<<"$NVCCFLAGS"
  nvccflags+=("$@" -Xcompiler=-fPIC ${NCCL_INCLUDE:+-isystem "$NCCL_INCLUDE"})
  [ "$kind" != rdc ] || nvccflags+=(-rdc=true)
  for unit in c d; do
    "$NVCC" "${nvccflags[@]}" -c "$sources/$unit.cu" -o "$build/$unit.o"
  done
  units_1+=("$build/c.o") units_2+=("$build/d.o")
  link=("$NVCC" -Xlinker=--fatal-warnings -Xcompiler=-pthread)
  [ "$kind" != rdc ] || link+=(-rdc=true)
  libraries=(${NCCL_LIBRARY:+"$NCCL_LIBRARY"})
  runner=("$ON_GPU")
fi
"${link[@]}" "$build/main.o" "${units_1[@]}" "${units_2[@]}" "${libraries[@]}" -o "$build/program"
"${link[@]}" -shared "${units_1[@]}" "${libraries[@]}" -o "$build/libone.so"
"${link[@]}" -shared "${units_2[@]}" "${libraries[@]}" -o "$build/libtwo.so"
"${link[@]}" "$build/main.o" -L"$build" -lone -ltwo "${libraries[@]}" -o "$build/program_of_libraries"
export LD_LIBRARY_PATH=$build${NCCL_LIBRARY:+:$(dirname "$NCCL_LIBRARY")}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
one=$("${runner[@]}" "$build/program") || { code=$?; echo "$one"; exit $code; }
two=$("${runner[@]}" "$build/program_of_libraries")
echo "$one, $two"
[ "$one" = "$two" ]
