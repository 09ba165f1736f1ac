#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Opens shard files and merged files with the safetensors package, and compares every number.

    safetensors_test.py SHARDOPT CHECKPOINT_MAKER WHEELS

WHEELS is a folder that may hold the package. The exit code is 0 if all is as expected, 1 if not, 77 if the package or
NumPy is not installed.
"""

import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile

PROGRAM, MAKER, WHEELS = sys.argv[1:4]
sys.path.append(WHEELS)
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../support"))
from installed import require  # noqa: E402

numpy = require("numpy", "Debian: apt install python3-numpy")
safetensors = require("safetensors", "pip install safetensors")
load_file = require("safetensors.numpy", "pip install safetensors").load_file

SHAPES = {
    "embedding": (1009, 2),
    "empty": (0, 7),
    "layer.1.bias": (255,),
    "layer.1.weight": (16, 16),
    "layer.2.bias": (1,),
    "layer.2.weight": (257, 3),
    "layer.10.weight": (3, 101),
    "scale": (),
}
NAMES = list(SHAPES)  # in numeric order
STATES = ["master", "exp_avg", "exp_avg_sq"]


def expected(name, state):
    """What checkpoint_maker saves: every element of a state."""
    count = int(numpy.prod(SHAPES[name], dtype=numpy.int64))
    base = 1000 * NAMES.index(name) + 100 * STATES.index(state) + 0.5
    return (base + numpy.arange(count) % 97).astype(numpy.float32)


def require(condition, what):
    if not condition:
        print(f"FAILED: {what}")
        sys.exit(1)


def check_shards(generation, world):
    """Each piece has the numbers of its range; together they cover every element once."""
    seen = {(name, state): numpy.zeros(expected(name, state).shape, int) for name in NAMES for state in STATES}
    for rank in range(world):
        path = os.path.join(generation, f"optimizer_pp-0-of-1_dp-{rank}-of-{world}.safetensors")
        with safetensors.safe_open(path, framework="np") as file:
            metadata = file.metadata()
            require(metadata["rank"] == str(rank) and metadata["world"] == str(world), f"metadata of {path}")
            for key in file.keys():
                name, state, elements = key.rsplit("/", 2)
                begin, end = map(int, elements.split("-"))
                tensor = file.get_tensor(key)
                require(tensor.dtype == numpy.float32 and tensor.shape == (end - begin,), f"{path}: type and shape of {key}")
                require(numpy.array_equal(tensor, expected(name, state)[begin:end]), f"{path}: numbers of {key}")
                seen[name, state][begin:end] += 1
    for key, counts in seen.items():
        require((counts == 1).all(), f"{key} is covered once in {generation}")


def check_merged(path):
    tensors = load_file(path)
    wanted = {name if state == "master" else f"{name}/{state}": (name, state) for name in NAMES for state in STATES}
    require(set(tensors) == set(wanted), f"names in {path}: {sorted(tensors)}")
    for key, (name, state) in wanted.items():
        require(tensors[key].shape == SHAPES[name] and tensors[key].dtype == numpy.float32, f"shape of {key}")
        require(numpy.array_equal(tensors[key].ravel(), expected(name, state)), f"numbers of {key}")
    with safetensors.safe_open(path, framework="np") as file:
        manifest = json.loads(file.metadata()["shardopt"])
    require(manifest["iteration"] == 20 and manifest["rule"]["name"] == "adamw", f"the manifest in {path}")


def main():
    folder = tempfile.mkdtemp(prefix="shardopt-safetensors-")
    try:
        for world in (1, 3, 8):
            generation = subprocess.run([MAKER, f"{folder}/{world}", str(world)], check=True, capture_output=True, text=True).stdout.strip()
            require(len(glob.glob(generation + "/*.safetensors")) == world, f"{world} files")
            check_shards(generation, world)
            merged = f"{folder}/{world}.safetensors"
            subprocess.run([PROGRAM, "merge", "-q", generation, merged], check=True)
            check_merged(merged)
        subprocess.run([PROGRAM, "reshard", "-q", "--world", "5", "--bucket-bytes", "4KiB", f"{folder}/3", f"{folder}/5"], check=True)
        check_shards(glob.glob(f"{folder}/5/generation-*")[0], 5)
    finally:
        shutil.rmtree(folder)
    print(f"safetensors {safetensors.__version__} reads all files")


main()
