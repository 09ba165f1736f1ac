# SPDX-License-Identifier: Apache-2.0
"""peers.py [ELEMENTS]: the same update by PyTorch's fused AdamW, as JSON like that of figures. Exit code 77: no PyTorch with CUDA."""

import json
import statistics
import sys

INTERVALS, LAUNCHES = 7, 5


def seconds(torch, launch) -> float:
    """Median of a launch, several to an interval."""
    launch()
    milliseconds = []
    for _ in range(INTERVALS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(LAUNCHES):
            launch()
        end.record()
        end.synchronize()
        milliseconds.append(begin.elapsed_time(end) / LAUNCHES)
    return statistics.median(milliseconds) / 1e3


def main() -> int:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its libraries
        print(f"skipped: this Python has no PyTorch that can be used: {error}")
        return 77
    if not torch.cuda.is_available():
        print("skipped: PyTorch finds no GPU")
        return 77
    elements = int(sys.argv[1]) if len(sys.argv) > 1 else 1 << 28
    figures = []

    def measure(name: str, bytes_per_element: int, launch) -> None:
        gigabytes = bytes_per_element * elements / seconds(torch, launch) / 1e9
        figures.append({"name": name, "bytes_per_element": bytes_per_element, "gigabytes_per_second": round(gigabytes, 1),
                        "of_copy": round(gigabytes / figures[0]["gigabytes_per_second"], 3) if figures else 1.0})

    source, target = (torch.zeros(elements, device="cuda") for _ in range(2))
    measure("PyTorch: copy", 8, lambda: target.copy_(source))
    parameter = torch.nn.Parameter(source)
    parameter.grad = target
    measure("PyTorch: fused AdamW fp32", 28, torch.optim.AdamW([parameter], fused=True).step)
    print(json.dumps({"elements": elements, "torch": torch.__version__, "figures": figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
