# SPDX-License-Identifier: Apache-2.0
"""inject.py LAUNCHER PROGRAM [--every N]: lets each call that PROGRAM makes fail once in turn (each N-th of a function's calls).

Asks the launcher for the calls (SHARDOPT_TEST_COUNTERS) and for failures (SHARDOPT_TEST_FAULTS). The program checks what is promised for
a failure and ends with 0. Exit code 77: no GPU, or the launcher understands neither.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

# What a failing call of each kind reports; others report cudaErrorInvalidValue or ncclInternalError.
STATUS = {"cudaMalloc": "cudaErrorMemoryAllocation", "cudaHostAlloc": "cudaErrorMemoryAllocation"}
# Their failure is a leak, or the end of the watching thread's look at one event: nothing more is promised.
FREEING = ("cudaFree", "cudaFreeHost", "cudaEventDestroy", "cudaStreamDestroy", "ncclCommDestroy", "ncclCommAbort")
LEAK = 99


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=300, check=False)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", nargs="+")
    parser.add_argument("--every", type=int, default=1)
    arguments = parser.parse_args()
    command = arguments.command

    with tempfile.TemporaryDirectory() as folder:
        counters = os.path.join(folder, "counters.json")
        plain = run(command, SHARDOPT_TEST_COUNTERS=counters)
        if plain.returncode != 0:
            print(plain.stdout + plain.stderr)
            return 77 if plain.returncode == 4 else 1
        if not os.path.exists(counters):
            print("skipped: the launcher writes no counters and takes no faults")
            return 77
        with open(counters, encoding="utf-8") as file:
            calls = {name: count for name, count in json.load(file)["calls"].items() if count}

    failures = runs = 0
    for name, count in sorted(calls.items()):
        numbers = sorted({*range(1, count + 1, arguments.every), count})
        for number in numbers:
            status = STATUS.get(name, "ncclInternalError" if name.startswith("nccl") else "cudaErrorInvalidValue")
            try:
                result = run(command, SHARDOPT_TEST_FAULTS=f"{name}#{number}={status}")
                code, text = result.returncode, result.stdout + result.stderr
            except subprocess.TimeoutExpired:
                code, text = -1, "hang"
            runs += 1
            for line in text.splitlines():
                if line.startswith("launcher: "):  # what it did beside launching
                    print(f"{name}, call {number}: {line}", flush=True)
            if code == 0 or (code == LEAK and name in FREEING):
                continue
            failures += 1
            print(f"{name}, call {number} of {count}: exit code {code}\n{text}", flush=True)
        print(f"{name}: {len(numbers)} of {count} calls failed in turn", flush=True)
    print(f"{runs} runs, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
