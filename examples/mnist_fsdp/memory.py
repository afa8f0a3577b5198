"""The most memory that tensors take while a function runs: by the device's count, or the CPU allocator's."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch


def peak_of(function: Callable[[], object], device: str) -> int:
    """Bytes that `function` held at its worst moment, beyond what was held before."""
    gc.collect()  # what went before must not be freed meanwhile
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        return torch.cuda.max_memory_allocated() - before
    with _silence(), torch.profiler.profile(profile_memory=True) as profile:
        function()
    found: Any = profile.profiler
    changes = [one for one in found.kineto_results.events() if one.name() == "[memory]"]
    held = most = 0
    for change in sorted(changes, key=lambda one: one.start_ns()):
        held += change.nbytes()
        most = max(most, held)
    return most


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Some builds of the profiler write lines of their own."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
