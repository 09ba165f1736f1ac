# SPDX-License-Identifier: Apache-2.0
"""traffic.py [--output FILE] LAUNCHER PROGRAM: what one step of each configuration moves, each number against its floor.

Runs PROGRAM (traffic.cu) with counters (SHARDOPT_TEST_COUNTERS, tests/README.md) for two numbers of steps, and takes the difference:
set-up and clean-up fall out. Fails if a number is too far from its floor, or if a step makes the host wait. Exit code 77: the launcher
writes no counters.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

FEW, MANY = 2, 6  # steps
TILE = 2048  # elements
SECTORS_OF_A_TILE = 8 * 20  # each of a tile's 8 warps reads its line of the map, and may begin and end within a sector
MOST_OF_FASTEST = 1.06  # of the longer of computation and communication: what a step costs that overlaps the other
HOST_WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMemcpyToSymbol",
              "cudaMemcpyFromSymbol", "cudaMemset", "cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost")
MOST_LAUNCHES_OF_ONE_BUCKET = 6
# What of the bytes of a collective's calls, summed over the ranks, goes over the wire.
WIRE = {"ncclReduceScatter": lambda n: n - 1, "ncclAllGather": lambda n: n - 1, "ncclReduce": lambda n: (n - 1) / n,
        "ncclBroadcast": lambda n: (n - 1) / n, "ncclSend": lambda n: 1, "ncclAllReduce": lambda n: 2 * (n - 1) / n}


def run(launcher: str, program: str, configuration: str, loop: str, steps: int) -> tuple[dict, dict]:
    with tempfile.TemporaryDirectory() as folder:
        counters = os.path.join(folder, "counters.json")
        result = subprocess.run([launcher, program, configuration, loop, str(steps)], capture_output=True, text=True, timeout=300,
                                env={**os.environ, "SHARDOPT_TEST_COUNTERS": counters}, check=False)
        if result.returncode == 4 or (result.returncode == 0 and not os.path.exists(counters)):
            print("skipped: nothing wrote the counters that SHARDOPT_TEST_COUNTERS asks for")
            sys.exit(77)
        if result.returncode != 0:
            sys.exit(f"{configuration}, {loop}: exit code {result.returncode}\n{result.stdout}{result.stderr}")
        with open(counters, encoding="utf-8") as file:
            return json.loads(result.stdout), json.load(file)


class Steps:
    """Counters of one step: the difference of two runs, divided by the difference of their steps."""

    def __init__(self, few: dict, many: dict) -> None:
        self.few, self.many = few, many

    def per_step(self, of) -> float:
        return (of(self.many) - of(self.few)) / (MANY - FEW)

    def kernels(self, part: str, *keys: str) -> float:
        return self.per_step(lambda c: sum(kernel[key] for name, kernel in c["kernels"].items() if part in name for key in keys))

    def elapsed_us(self) -> float:
        return self.per_step(lambda c: c["elapsed_us"])

    def waits(self) -> dict[str, float]:
        counts = {name: self.per_step(lambda c, name=name: c["calls"].get(name, 0)) for name in HOST_WAITS}
        return {name: count for name, count in counts.items() if count != 0}

    def collective_calls(self) -> float:
        return self.per_step(lambda c: sum(call["calls"] for name, call in c["collectives"].items() if name in WIRE))

    def wire_bytes(self, ranks: int) -> float:
        return self.per_step(lambda c: sum(WIRE[name](ranks) * call["bytes"] for name, call in c["collectives"].items() if name in WIRE))


def describe(launcher: str, program: str, configuration: str) -> tuple[list[str], list[str]]:
    """The cells of one line, and what is wrong."""
    loops = {}
    for loop in ("compute", "step", "plain", "overlapped"):
        (floor, few), (_, many) = (run(launcher, program, configuration, loop, steps) for steps in (FEW, MANY))
        loops[loop] = Steps(few, many)
    steps = loops["overlapped"]
    ranks, elements = floor["ranks"], floor["elements"]
    wrong = []

    def require(condition: bool, text: str) -> None:
        if not condition:
            wrong.append(f"{configuration}: {text}")

    cells = [configuration]
    for part, least, slack in (("update_kernel", floor["update_bytes"], 1.02), ("add_squares_kernel", floor["norm_bytes"], 1.05)):
        moved = steps.kernels(part, "unique_load_bytes", "unique_store_bytes")
        # Slices shorter than a tile each have a line of the map.
        most = least * slack + 64 * floor["parameters"] * ranks
        require(least <= moved <= most, f"{part} moves {moved:.0f} bytes; the floor is {least}")
        cells.append(f"{moved / elements:.2f} / {least / elements:.0f}")
    sectors = steps.kernels("update_kernel", "load_sectors", "store_sectors")
    tiles = elements / TILE + floor["parameters"] + ranks * floor["buckets"]  # those that a slice's end cuts short, too
    most = floor["update_bytes"] / 32 + SECTORS_OF_A_TILE * tiles
    require(sectors <= most, f"the update touches {sectors:.0f} sectors of 32 bytes; at most {most:.0f} are expected")
    cells.append(f"{sectors / elements:.3f} / {floor['update_bytes'] / 32 / elements:.3f}")

    launches = steps.kernels("", "launches") / ranks
    if floor["buckets"] == 1:
        require(launches <= MOST_LAUNCHES_OF_ONE_BUCKET, f"{launches} launches of the library's kernels in a step of one bucket")
    # Open, measure and decide; norm and update of each bucket.
    cells.append(f"{launches:g} / {3 + 2 * floor['buckets']}")

    waits = {name: count for loop in ("step", "plain", "overlapped") for name, count in loops[loop].waits().items()}
    require(not waits, f"calls in each step that wait or allocate: {waits}")
    cells.append(f"{sum(waits.values()):g} / 0")

    wire = steps.wire_bytes(ranks)
    small = 2 * 1024 * ranks  # the one all-reduce
    require(floor["wire_bytes"] <= wire <= floor["wire_bytes"] + small, f"{wire:.0f} bytes travel; the floor is {floor['wire_bytes']}")
    cells.append(f"{steps.collective_calls() / ranks:g}")
    cells.append(f"{wire / ranks / elements:.3f} / {floor['wire_bytes'] / ranks / elements:.3f}")

    times = {loop: loops[loop].elapsed_us() for loop in loops}
    fastest = max(times["compute"], times["step"])
    require(times["overlapped"] <= 1.01 * times["plain"], f"overlap costs time: {times}")
    require(times["overlapped"] <= MOST_OF_FASTEST * fastest, f"overlapped it takes {times['overlapped']:.0f} us; the floor is {fastest:.0f}")
    cells.append(f"{times['compute']:.0f} + {times['step']:.0f}")
    cells.append(f"{times['plain']:.0f} / {fastest:.0f}")
    cells.append(f"{times['overlapped']:.0f} / {fastest:.0f}")
    return cells, wrong


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("launcher")
    parser.add_argument("program")
    parser.add_argument("--output", help="file for the table")
    arguments = parser.parse_args()
    listed = subprocess.run([arguments.program, "--list"], capture_output=True, text=True, check=False)
    configurations = listed.stdout.splitlines()
    if not configurations:
        sys.exit(f"{arguments.program} --list names no configuration: {listed.stderr}")
    header = ["one step, value / floor", "update, bytes a parameter", "norm, bytes a parameter", "update, 32-byte sectors a parameter",
              "launches a rank", "host waits", "collectives a rank", "sent, bytes a parameter and rank",
              "computation + step, each alone, us", "one after the other, us", "overlapped, us"]
    lines = [header, ["---"] * len(header)]
    wrong = []
    for configuration in configurations:
        cells, failures = describe(arguments.launcher, arguments.program, configuration)
        lines.append(cells)
        wrong += failures
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    print(table)
    if arguments.output:
        with open(arguments.output, "w", encoding="utf-8") as file:
            file.write(table + "\n")
    for text in wrong:
        print(f"FAILED: {text}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
