# SPDX-License-Identifier: Apache-2.0
"""inject.py LAUNCHER PROGRAM [--every N] [--jobs N]: lets each call that PROGRAM makes fail once in turn.

PROGRAM trains in several ways, named by its argument. --every: only each N-th of a function's calls, the ways sharing them.
--jobs: runs at once. Then kernels fault, and the device is lost. Asks the launcher for the calls (SHARDOPT_TEST_COUNTERS) and for
failures (SHARDOPT_TEST_FAULTS). The program checks what is promised for a failure, says what came of it, and ends with 0; what
trained in spite of it gave the bits of a run without. Exit code 77: no GPU, or the launcher understands neither.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import re
import subprocess
import sys
import tempfile

WAYS = ("flat", "native", "threads", "captured")
# What a failing call of each kind reports; others report cudaErrorInvalidValue or ncclInternalError.
STATUS = {"cudaMalloc": "cudaErrorMemoryAllocation", "cudaHostAlloc": "cudaErrorMemoryAllocation"}
# Their failure is a leak: nothing more is promised. The program says which of them are of no consequence.
FREEING = ("cudaFree", "cudaFreeHost", "cudaEventDestroy", "cudaStreamDestroy", "cudaGraphDestroy", "cudaGraphExecDestroy",
           "ncclCommDestroy", "ncclCommAbort")
LEAK = 99


class Tests:
    """Runs of the program, and what was wrong with them."""

    def __init__(self, command: list[str]):
        self.command = command
        self.runs = self.failures = 0
        self.trained = {}  # way: what its ranks say without a failure

    def run(self, way: str, *arguments: str, **variables: str) -> tuple[int, str]:
        """Exit code and output."""
        try:
            done = subprocess.run([*self.command, way, *arguments], env={**os.environ, **variables}, capture_output=True, text=True,
                                  timeout=300, check=False)
        except subprocess.TimeoutExpired:
            return -1, "hang"
        return done.returncode, done.stdout + done.stderr

    def fault(self, what: str, way: str, fault: str, may_leak: bool, *arguments: str) -> str:
        """One failure. Returns what came of it."""
        code, text = self.run(way, *arguments, SHARDOPT_TEST_FAULTS=fault)
        self.runs += 1
        for line in text.splitlines():
            if line.startswith("launcher: "):  # what it did beside launching
                print(f"{way}, {what}: {line}", flush=True)
        wrong = "" if code == 0 or (code == LEAK and may_leak) else f"exit code {code}"
        for end in re.findall(r"^rank \d+: trained \w+$", text, re.MULTILINE):
            if end not in self.trained[way]:
                wrong = wrong or f"other bits than without the failure, which are\n{self.trained[way]}"
        if wrong:
            self.complain(f"{way}, {what}: {wrong}\n{text}")
        outcome = re.search(r"^the failure: (.*)$", text, re.MULTILINE)
        return outcome[1] if outcome else "none came"

    def complain(self, text: str) -> None:
        self.failures += 1
        print(text, flush=True)


def tally(outcomes: list[str]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(collections.Counter(outcomes).items()))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", nargs="+")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    tests = Tests(arguments.command)

    calls = collections.defaultdict(list)  # function: way and number of each of its calls
    kernels = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            counters = os.path.join(folder, f"{way}.json")
            code, text = tests.run(way, SHARDOPT_TEST_COUNTERS=counters)
            if code != 0:
                print(text)
                return 77 if code == 4 else 1
            if not os.path.exists(counters):
                print("skipped: the launcher writes no counters and takes no faults")
                return 77
            tests.trained[way] = text
            with open(counters, encoding="utf-8") as file:
                counted = json.load(file)
            for name, count in counted["calls"].items():
                calls[name] += [(way, number) for number in range(1, count + 1)]
            for name, kernel in counted["kernels"].items():
                kernels[re.sub(r"^.*?(\w+_kernel).*$", r"\1", name)] += [(way, number) for number in range(1, kernel["launches"] + 1)]

    step = arguments.every * len(WAYS) if arguments.every > 1 else 1
    with concurrent.futures.ThreadPoolExecutor(max_workers=arguments.jobs) as pool:

        def in_turn(made: list[tuple[str, int]], chosen: list[int], what: str, fault: str, may_leak: bool, *options: str) -> list[str]:
            def one(k: int) -> str:
                way, number = made[k]
                return tests.fault(f"{what} {number}", way, fault.format(number), may_leak, *options)

            return list(pool.map(one, chosen))

        for name, made in sorted(calls.items()):
            if not made:
                continue
            status = STATUS.get(name, "ncclInternalError" if name.startswith("nccl") else "cudaErrorInvalidValue")
            chosen = sorted({*range(0, len(made), step), len(made) - 1})
            outcomes = in_turn(made, chosen, f"{name}, call", f"{name}#{{}}={status}", name in FREEING)
            print(f"{name}: {len(chosen)} of {len(made)} calls failed in turn: {tally(outcomes)}", flush=True)
            if "of no consequence" in outcomes and name not in FREEING and "told" not in outcomes:
                tests.complain(f"{name}: no failure was told")
        for name, made in sorted(kernels.items()):
            if arguments.every > 1 and name != "update_kernel":
                continue
            chosen = list(range(1, len(made), step))
            outcomes = in_turn(made, chosen, f"{name}, launch", f"kernel:{name}#{{}}=illegal", True, "lost")
            print(f"{name}: {len(chosen)} of {len(made)} launches faulted in turn: {tally(outcomes)}", flush=True)
    print(f"{tests.runs} runs, {tests.failures} failures")
    return 1 if tests.failures else 0


if __name__ == "__main__":
    sys.exit(main())
