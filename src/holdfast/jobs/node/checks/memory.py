"""Checks of the memory: a copy that is timed and compared, and what is free for staging saves."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from holdfast.jobs.node.checks.disk import first_difference
from holdfast.jobs.node.checks.result import Check
from holdfast.system.host_memory import available_bytes, total_bytes
from holdfast.system.units import format_bytes

COPY_BYTES = 16 << 20
_FEW_COPY_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20
_NUM_COPIES = 3


def check_copy(available: int) -> Iterator[Check]:
    """Yield the result of copies within the memory of this machine.

    Args:
        available: free memory, which limits the size of the copy.
    """
    num_bytes = COPY_BYTES if available > 8 * COPY_BYTES else _FEW_COPY_BYTES
    source = os.urandom(_PIECE_BYTES) * (num_bytes // _PIECE_BYTES)
    copy = bytearray(num_bytes)
    view = memoryview(copy)
    best_s = float("inf")
    for _ in range(_NUM_COPIES):
        started_s = time.perf_counter()
        view[:] = source
        best_s = min(best_s, time.perf_counter() - started_s)
    yield compare_copy(source, copy, {"copied_bytes": num_bytes, "copy_s": best_s})


def compare_copy(source: bytes, copy: bytearray, values: dict[str, float]) -> Check:
    """Return the result of a copy."""
    if copy == source:
        return Check("copy", "memory", values=values)
    trouble = f"a copy differs from its source, from byte {first_difference(source, bytes(copy))} on"
    return Check("copy", "memory", trouble, stops=True, is_wrong=True, values=values)


def check_free_memory(available: int, needed: int) -> Iterator[Check]:
    """Yield the result for free memory.

    Args:
        needed: bytes of a save that are staged on this node; 0 if that is not known.
    """
    values = {"available_bytes": available, "total_bytes": total_bytes(), "needed_bytes": needed}
    trouble = ""
    if available < needed:
        trouble = (
            f"staging the next save takes {format_bytes(needed)}, and {format_bytes(available)} are free"
        )
    yield Check("memory", "free", trouble, values=values)


def check_memory(needed: int) -> Iterator[Check]:
    """Yield the results of all checks of the memory; see `check_free_memory`."""
    available = available_bytes()
    yield from check_free_memory(available, needed)
    yield from check_copy(available)
