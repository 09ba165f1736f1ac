# SPDX-License-Identifier: Apache-2.0
"""dropped_waits.py [--ranks N] [--but VARIANT] COMMAND...: runs COMMAND VARIANT WAIT RANK for each variant that COMMAND names, each wait that a
rank makes in it, and each of the first N ranks (1), and sees that a launcher which looks for unordered accesses reports them each time, or that
CUDA refuses the capture: no wait is superfluous. Another failure does not count. Exit code 77: the launcher does not look."""

import argparse
import subprocess
import sys

UNORDERED = 98  # of a launcher that has found unordered accesses (tests/README.md)
REFUSED = 3  # of the program: CUDA refuses the capture


def run(command: list[str], *arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--but", action="append", default=[])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    command = arguments.command

    names = run(command)
    if names.returncode != 0:
        print(names.stdout[-2000:] + names.stderr[-2000:])
        return 77 if names.returncode == 4 else 1
    reported = wrong = 0
    for variant in names.stdout.split():
        if variant in arguments.but:
            continue
        for rank in range(arguments.ranks):
            plain = run(command, variant, -1, rank)
            if plain.returncode != 0:
                print(f"{variant}: exit code {plain.returncode} though no wait was dropped\n{plain.stdout[-2000:]}{plain.stderr[-2000:]}")
                return 1
            waits = int(plain.stdout.split()[-1])
            ends = {number: run(command, variant, number, rank) for number in range(waits)}
            by_code = {code: [n for n, end in ends.items() if end.returncode == code] for code in {end.returncode for end in ends.values()}}
            seen = by_code.pop(UNORDERED, [])
            refused = by_code.pop(REFUSED, [])
            reported += len(seen)
            wrong += waits - len(seen) - len(refused)
            print(f"{variant}, rank {rank}: {waits} waits, {len(seen)} reported when dropped, {len(refused)} refused in the capture; "
                  f"not missed, by exit code: {by_code or 'none'}", flush=True)
            for code in set(by_code) - {0}:
                print(ends[by_code[code][0]].stderr[-2000:])
            wrong += waits == 0
            if reported == 0:
                print("skipped: the launcher does not look for unordered accesses")
                return 77
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
