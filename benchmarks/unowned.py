"""Saves of the same tensors without an optimizer that owns them, beside copies of them in memory."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from idle import wait_idle
from limits import MemoryCopy
from states import Subject

NUM_SAVES = 4
"""Saves of which the first does not count: its memory is touched for the first time."""


def measure(subject: Subject, directory: Path) -> dict[str, float]:
    """Return the median seconds that `save()` blocks for, and those of a copy in memory just before.

    The tensors are in a plain dict, as an average of weights would be. Nothing waits for a copy of them
    before it writes to them, so that all is copied before `save()` returns.
    """
    import holdfast

    directory.mkdir()

    memory_bytes = int(1.1 * subject.num_bytes) + (64 << 20)
    blocked_s, copies_s = [], []
    copy = MemoryCopy(subject)
    with holdfast.Checkpointer(
        directory / "home",
        {"tensors": subject.tensors()},
        every=10**9,
        keep=1,
        memory=memory_bytes,
        quiet=True,
    ) as checkpointer:
        checkpointer.prepare()
        for step in range(1, NUM_SAVES + 1):
            wait_idle(directory)
            copies_s.append(copy.run())
            started = time.perf_counter()
            save = checkpointer.save(step)
            blocked_s.append(time.perf_counter() - started)
            save.wait_durable()
    return {
        "unowned_blocked_s": statistics.median(blocked_s[1:]),
        "unowned_copy_s": statistics.median(copies_s[1:]),
    }
