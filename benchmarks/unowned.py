"""Saves of the same tensors without an optimizer that owns them, beside copies of them in memory."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from idle import wait_idle
from limits import MemoryCopy
from states import Subject

NUM_OBSERVED = 2
"""Saves after which it is observed when the tensors are written. They do not count."""
NUM_SAVES = 2
"""Saves that count."""


def measure(subject: Subject, directory: Path) -> dict[str, float]:
    """Return the median seconds that `save()` blocks for, and those of a copy in memory just before each.

    `averages_*`: the tensors are written after each optimizer step, as averages of weights are.
    `unowned_*`: they are in a plain dict without any optimizer, and may be written at any time.
    """
    directory.mkdir()
    tensors = subject.tensors()
    layer = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step() -> None:
        layer(torch.ones(8)).sum().backward()
        optimizer.step()
        for tensor in tensors.values():
            tensor.mul_(1.0)

    trained = {"layer": layer, "optimizer": optimizer, "averages": tensors}
    averages = _measure(subject, directory / "averages", trained, step, num_first=NUM_OBSERVED + 1)
    plain = _measure(subject, directory / "plain", {"tensors": tensors}, lambda: None, num_first=1)
    return {
        "averages_blocked_s": averages[0],
        "averages_copy_s": averages[1],
        "unowned_blocked_s": plain[0],
        "unowned_copy_s": plain[1],
    }


def _measure(
    subject: Subject, home: Path, state: dict[str, Any], before: Callable[[], None], *, num_first: int
) -> tuple[float, float]:
    """Return the median seconds of a save and of a copy, calling `before` before each save.

    The first saves do not count; memory is touched for the first time in the very first one.
    """
    import holdfast

    memory_bytes = int(1.1 * subject.num_bytes) + (64 << 20)
    blocked_s, copies_s = [], []
    copy = MemoryCopy(subject)
    with holdfast.Checkpointer(
        home, state, every=10**9, keep=1, memory=memory_bytes, quiet=True
    ) as checkpointer:
        checkpointer.prepare()
        for step in range(1, num_first + NUM_SAVES + 1):
            wait_idle(home.parent)
            before()
            copies_s.append(copy.run())
            started = time.perf_counter()
            save = checkpointer.save(step)
            blocked_s.append(time.perf_counter() - started)
            save.wait_durable()
    shutil.rmtree(home)  # a disk may have room for two states only
    return statistics.median(blocked_s[num_first:]), statistics.median(copies_s[num_first:])
