# SPDX-License-Identifier: Apache-2.0
"""dropped_waits.py COMMAND...: runs COMMAND N for each wait N that it makes, and sees that a launcher which looks for unordered accesses
fails each of them: no wait is superfluous. Exit code 77: the launcher does not look."""

import subprocess
import sys


def run(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def main(command: list[str]) -> int:
    plain = run(command)
    if plain.returncode != 0:
        print(plain.stdout[-2000:] + plain.stderr[-2000:])
        return 77 if plain.returncode == 4 else 1
    waits = int(plain.stdout.split()[-1])
    unseen = [number for number in range(waits) if run([*command, str(number)]).returncode == 0]
    print(f"{waits} waits, {waits - len(unseen)} missed when dropped; not missed: {unseen or 'none'}")
    if len(unseen) == waits:
        print("skipped: the launcher does not look for unordered accesses")
        return 77
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
