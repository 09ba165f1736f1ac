#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# on_gpu.sh PROGRAM ARGS...: runs a program that needs a GPU, through SHARDOPT_GPU_LAUNCHER if it is set, on the GPU
# if one answers; else says why not and exits with 4, the code of a Catch2 program that skipped all its tests.

for argument in "$@"; do
  case $argument in --list-*) exec "$@" ;; esac # listing needs no GPU
done
if [ -n "${SHARDOPT_GPU_LAUNCHER:-}" ]; then
  # shellcheck disable=SC2086 # the launcher may bring arguments of its own
  exec $SHARDOPT_GPU_LAUNCHER "$@"
fi
if timeout 30 nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
  exec "$@"
fi
echo "skipped: no GPU answers, and SHARDOPT_GPU_LAUNCHER is not set"
exit 4
