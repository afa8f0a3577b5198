"""Check of the GPUs: a script for the Python of the job, which needs only torch.

Products of matrices of small integers are exact in every type, with tensor cores too: elements of up to 200
fit in the 11 bits of TF32, and sums stay below 2**24. In bfloat16, elements are -1, 0 or 1 and sums are at
most 256.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

SIZE = 256
GREATEST = {"float64": 1 << 20, "float32": 200, "bfloat16": 1}
COPY_BYTES = 64 << 20


def main(kinds: list[str]) -> None:
    """Print the results for all devices of these kinds, as lines of JSON."""
    try:
        import torch
    except ImportError:
        return  # the job may use another library
    for kind in kinds:
        num_devices = torch.cuda.device_count() if kind == "cuda" else 1
        for number in range(num_devices):
            device = torch.device(kind, number) if kind == "cuda" else torch.device(kind)
            sys.stdout.write(f"{json.dumps(check_device(torch, device))}\n")
            sys.stdout.flush()


def check_device(torch: Any, device: Any) -> dict[str, Any]:
    """Return the result for one device, with the members of `Check`."""
    wrong = [name for name in GREATEST if not is_right(torch, device, name)]
    values, is_same = copy(torch, device)
    if not is_same:
        wrong.append("a copy to it and back")
    trouble = f"wrong results: {', '.join(wrong)}" if wrong else ""
    return {
        "name": "gpu",
        "where": str(device),
        "trouble": trouble,
        "stops": bool(wrong),
        "is_wrong": bool(wrong),
        "values": values,
    }


def is_right(torch: Any, device: Any, name: str) -> bool:
    """Return True if a product on the device equals that of 64-bit integers."""
    left, right = (matrix(torch, GREATEST[name], seed) for seed in (1, 2))
    dtype = getattr(torch, name)
    found = left.to(device, dtype) @ right.to(device, dtype)
    return bool(torch.equal(found.cpu().to(torch.int64), left @ right))


def matrix(torch: Any, greatest: int, seed: int) -> Any:
    """Return a matrix of integers between -greatest and greatest, the same everywhere."""
    index = torch.arange(SIZE * SIZE, dtype=torch.int64)
    mixed = (index + 1) * 2654435761 + seed * 40503
    mixed = ((mixed ^ (mixed >> 15)) & 0xFFFFFFF) * 40503
    return ((mixed >> 9) % (2 * greatest + 1) - greatest).reshape(SIZE, SIZE)


def copy(torch: Any, device: Any) -> tuple[dict[str, float], bool]:
    """Return the numbers of a copy there and back, and True if it is equal."""
    source = torch.arange(COPY_BYTES // 8, dtype=torch.int64)
    started_s = time.perf_counter()
    there = source.to(device, copy=True)
    back = there.cpu()
    took_s = time.perf_counter() - started_s
    values = {"copied_bytes": 2.0 * COPY_BYTES, "copy_s": took_s}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        values |= {"available_bytes": float(free), "total_bytes": float(total)}
    return values, bool(torch.equal(source, back))


if __name__ == "__main__":
    main(sys.argv[1:] or ["cuda"])
