# SPDX-License-Identifier: Apache-2.0
"""counters.py STATISTICS COUNTERS: turns the emulator's statistics into the counters of tests/README.md."""

import json
import sys

KERNEL = ("launches", "threads", "load_bytes", "store_bytes", "unique_load_bytes", "unique_store_bytes", "load_sectors",
          "store_sectors", "atomics")


def main(source: str, target: str) -> None:
    with open(source, encoding="utf-8") as file:
        statistics = json.load(file)
    collectives: dict[str, dict[str, int]] = {}
    for calls in statistics.get("nccl", {}).values():
        for name, call in calls.items():
            if not isinstance(call, dict):
                continue
            total = collectives.setdefault(name, {"calls": 0, "bytes": 0})
            for key in total:
                total[key] += call.get(key, 0)
    counters = {
        "format": 1,
        "elapsed_us": statistics["virtual_us"],
        "devices": [{"peak_bytes": d["peak_bytes"], "used_bytes": d["used_bytes"]} for d in statistics["devices"]],
        "kernels": {name: {key: kernel[key] for key in KERNEL} for name, kernel in statistics["kernels"].items()},
        "copies": statistics["copies"],
        "collectives": collectives,
        "calls": statistics["api"],
    }
    with open(target, "w", encoding="utf-8") as file:
        json.dump(counters, file, indent=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
