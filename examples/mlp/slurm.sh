#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Trains on several machines, one process a GPU. The first argument is the program, the rest are its options:
#   sbatch slurm.sh build/mlp --batch 256
#   sbatch --nodes=4 --ntasks-per-node=4 --gpus-per-node=4 slurm.sh build/mlp
#SBATCH --job-name=mlp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=00:10:00
set -eu

if [ $# -eq 0 ]; then
  echo "usage: sbatch slurm.sh PROGRAM [OPTION...]" >&2
  exit 2
fi
# Each task finds its rank, its GPU and rank 0's machine in what srun sets. A task that fails ends the others.
exec srun --kill-on-bad-exit=1 "$@"
