#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# stand_alone.sh WORK EXAMPLE CUDA ARGS...: builds an example as a project of its own, against an installed package, without
# CUDA if CUDA is OFF, and runs it with ARGS. Expects CMAKE, GENERATOR, PROJECT_BUILD, SOURCE and CXX in the environment.
set -eu
work=$1
example=$2
[ "$3" = ON ] && without= || without=-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON
shift 3
rm -rf "$work"
"$CMAKE" --install "$PROJECT_BUILD" --prefix "$work/prefix" >/dev/null
"$CMAKE" -S "$SOURCE/examples/$example" -B "$work/build" -G "$GENERATOR" -DCMAKE_CXX_COMPILER="$CXX" \
  -DCMAKE_PREFIX_PATH="$work/prefix" $without
"$CMAKE" --build "$work/build" --parallel 1
"$work/build/$example" "$@"
rm -rf "$work"
