#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# consume.sh FOLDER find_package|add_subdirectory|missing_component [host|nccl]
set -euo pipefail
here=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
work=$(mkdir -p "$1" && mktemp -d "$1/XXXXXX")
trap 'rm -rf "$work"' EXIT
kind=$2 component=${3:-host}

configure() { "$CMAKE" -G "$GENERATOR" -S "$1" -B "$work/build" -DCOMPONENT="$component" "${options[@]}"; }

options=()
if [ "$component" = nccl ]; then
  options+=(-DNCCL_INCLUDE_DIR="$NCCL_INCLUDE_DIR" -DNCCL_LIBRARY="$NCCL_LIBRARY")
else # as on a machine that has no CUDA
  options+=(-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON)
fi
if [ "$kind" != add_subdirectory ]; then
  "$CMAKE" --install "$PROJECT_BUILD" --prefix "$work/prefix" >/dev/null
  mv "$work/prefix" "$work/moved"
  if grep -rlF -e "$work/prefix" -e "$SOURCE/" "$work/moved"; then
    echo "these installed files hold paths of this machine" >&2
    exit 1
  fi
  options+=(-DCMAKE_PREFIX_PATH="$work/moved")
else
  options+=(-DSHARDOPT_SOURCE_DIR="$SOURCE")
fi

if [ "$kind" = missing_component ]; then
  for want in "cuda|component 'cuda' needs the CUDA toolkit" "mpi|component 'mpi' is not one of host, cuda, nccl"; do
    component=${want%%|*}
    if output=$(configure "$here/find_package" 2>&1); then
      echo "a package without $component was accepted" >&2
      exit 1
    fi
    tr -s '\n ' ' ' <<<"$output" | grep -F "${want#*|}" >/dev/null || { echo "$output"; exit 1; }
    rm -rf "$work/build"
  done
  exit 0
fi

configure "$here/$kind"
"$CMAKE" --build "$work/build"
if [ "$component" = host ]; then "$work/build/consumer"; else "$ON_GPU" "$work/build/consumer"; fi
