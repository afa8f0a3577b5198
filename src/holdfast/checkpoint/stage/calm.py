"""Tensors that no optimizer owns and nothing writes to before the next step."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from holdfast.checkpoint.stage.watch import WriteWatch

_all: weakref.WeakSet[CalmTensors] = weakref.WeakSet()
_ENOUGH = 2
"""Observations in a row without a write, after which a tensor is calm."""


class CalmTensors:
    """Names of tensors that are written only after a step, such as averages of weights.

    An optimizer waits for the background copies before its step, so a tensor that is never written earlier
    need not be copied before a save returns. After the 1st, 2nd, 4th, 8th, ... save, the kernel's record of
    writes continues until the next step of an optimizer of the state. A tensor without a write in two such
    observations in a row is calm. If a background copy of it is torn, it never is again.
    """

    def __init__(self) -> None:
        self._num_quiet: dict[str, int] = {}  # observations in a row without a write, by name
        self._torn: set[str] = set()
        self._plan: int | None = None
        self._num_saves = 0  # with this plan
        self._watch: WriteWatch | None = None
        self._observed: Mapping[int, str] = {}
        self._pid = os.getpid()
        self._lock = threading.Lock()  # another thread may step while this one saves or closes
        _all.add(self)

    def __contains__(self, name: str) -> bool:
        return self._num_quiet.get(name, 0) >= _ENOUGH

    @property
    def observed(self) -> Collection[int]:
        """Indices of the tensors that are being observed."""
        return () if self._watch is None else self._observed

    def choose(self, plan: int, names: Mapping[int, str]) -> Mapping[int, str]:
        """Count a save, and return the tensors to observe after it.

        Args:
            plan: number of its plan. A new one begins the series of saves again.
            names: tensors that no optimizer owns and that can be watched, by index.
        """
        if plan != self._plan:
            self._plan, self._num_saves = plan, 0
        self._num_saves += 1
        if self._num_saves & (self._num_saves - 1):
            return {}
        return {i: name for i, name in names.items() if name not in self and name not in self._torn}

    def observe(self, watch: WriteWatch, names: Mapping[int, str]) -> None:
        """Observe tensors until `end` or `cancel`.

        Args:
            watch: a watch over them, which ends with the observation.
            names: tensors of the watch, by index.
        """
        if names:  # without the tensors themselves: training may release them
            self._watch, self._observed = replace(watch, tensors={}, edges=None), names
        else:
            watch.cancel()

    def end(self) -> list[int]:
        """End the observation, if there is one, at a step. Return the indices of tensors that were written.

        Blocks: 5 to 60 ms per GB in pages of 4 KiB, if there is one.
        """
        if self._watch is None or os.getpid() != self._pid:  # a child's is that of its parent
            return []
        with self._lock:
            watch, self._watch = self._watch, None
            if watch is None:
                return []
            written = watch.find_written()
            watch.cancel()
        for index, name in self._observed.items():
            self._num_quiet[name] = 0 if index in written else self._num_quiet.get(name, 0) + 1
        return written

    def cancel(self) -> None:
        """End the observation, if there is one, without a result."""
        if self._watch is None or os.getpid() != self._pid:
            return
        with self._lock:
            watch, self._watch = self._watch, None
            if watch is not None:
                watch.cancel()

    def record_torn(self, names: Iterable[str]) -> None:
        """Record tensors that were written while they were copied in the background."""
        for name in names:
            if self._num_quiet.pop(name, None) is not None:
                self._torn.add(name)


def cancel_all() -> None:
    """End the observations of all stagers of this process: memory can be watched by one only."""
    for one in list(_all):
        one.cancel()
