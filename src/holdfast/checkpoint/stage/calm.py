"""Tensors by their writes: calm ones, those of torn copies, and PyTorch's counters of writes."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from msgspec.structs import replace

from holdfast.checkpoint.stage.watch import WriteWatch
from holdfast.checkpoint.state.tensors import versions

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
        self.torn: set[str] = set()  # by name; without an owner here, never copied in the background again
        self._plan: object = None
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

    def choose(self, plan: object, names: Mapping[int, str]) -> Mapping[int, str]:
        """Count a save, and return the tensors to observe after it. A new plan begins the series again.

        The names are those of tensors that no optimizer owns and that can be watched, by index.
        """
        if plan is not self._plan:
            self._plan, self._num_saves = plan, 0
        self._num_saves += 1
        if self._num_saves & (self._num_saves - 1):
            return {}
        return {i: name for i, name in names.items() if name not in self and name not in self.torn}

    def observe(self, watch: WriteWatch, names: Mapping[int, str]) -> None:
        """Observe the tensors of a watch, which ends with the observation, until `end` or `cancel`."""
        # Without the tensors themselves: training may release them.
        self._watch, self._observed = replace(watch, tensors={}, edges=None), names

    def end(self) -> list[int]:
        """End the observation, if there is one, at a step. Return the indices of tensors that were written.

        Blocks: 5 to 60 ms per GB in pages of 4 KiB.
        """
        written = self._stop(WriteWatch.end)
        if written is None:
            return []
        for index, name in self._observed.items():
            self._num_quiet[name] = 0 if index in written else self._num_quiet.get(name, 0) + 1
        return written

    def cancel(self) -> None:
        """End the observation, if there is one, without a result."""
        self._stop(WriteWatch.cancel)

    def _stop(self, how: Callable[[WriteWatch], list[int] | None]) -> list[int] | None:
        if self._watch is None or os.getpid() != self._pid:  # a child's is that of its parent
            return None
        with self._lock:
            watch, self._watch = self._watch, None
            return None if watch is None else how(watch)

    def record_torn(self, names: Iterable[str]) -> None:
        """Record tensors that were written while they were copied in the background."""
        for name in names:
            if self._num_quiet.pop(name, None) is not None:
                self.torn.add(name)


def cancel_all() -> None:
    """End the observations of all stagers of this process: memory can be watched by one only."""
    for calm in list(_all):
        calm.cancel()


_FIRST_SAVES = 8
_MAX_SAVES = 1 << 20


class Repeats:
    """Chooses the tensors that the next save copies before it returns, after a torn copy.

    After a first tear these are the tensors that were written; if another save is torn meanwhile, all of
    them. This lasts for 8 saves, and after each further tear for twice as many: a loop that writes to tensors
    once is slowed down briefly, one that always does keeps its saves.
    """

    def __init__(self) -> None:
        self.num_torn = 0
        self._names: frozenset[str] = frozenset()
        self._are_all = False
        self._saves_left = 0

    def record_torn(self, names: Iterable[str]) -> None:
        """Count a save that was torn, as some tensors were written during its copy."""
        if self._saves_left:
            self._are_all = True
        self._names |= frozenset(names)
        self._saves_left = min(_FIRST_SAVES << self.num_torn, _MAX_SAVES)
        self.num_torn += 1

    def record_torn_elsewhere(self) -> None:
        """Count a save that was torn on another rank; the next saves copy everything before returning."""
        # Otherwise each rank would be torn by itself at another save, and none would be complete (note 013).
        self.record_torn(())
        self._are_all = True

    def record_saved(self) -> None:
        """Count a save that was not torn."""
        self._saves_left = max(0, self._saves_left - 1)
        if not self._saves_left:
            self._names, self._are_all = frozenset(), False

    def __contains__(self, name: str) -> bool:
        return self._are_all or name in self._names

    def __bool__(self) -> bool:
        return self._saves_left > 0


class VersionCounters:
    """PyTorch's version counters of some tensors at the start of the copy.

    PyTorch counts a write after its kernel has run or, on a device, has been queued. It never counts writes
    through `.data` or from outside of PyTorch. So a changed counter proves a write, but an unchanged one
    proves nothing.
    """

    def __init__(self, tensors: Mapping[int, torch.Tensor]) -> None:
        self._tensors = tensors
        self._before = versions(tensors.values())
        self._changed: set[int] = set()
        self._stepped: set[int] = set()

    def find_changed(self) -> set[int]:
        """Return the indices of written tensors, ignoring steps that wait for the copy."""
        now = versions(self._tensors.values())
        for index, before, after in zip(self._tensors, self._before, now, strict=True):
            if before != after and index not in self._stepped:
                self._changed.add(index)
        return self._changed

    def begin_step(self, addresses: set[int]) -> None:
        """Expect writes to the tensors at `addresses` from now on, after the copy."""
        self.find_changed()
        self._stepped.update(i for i, tensor in self._tensors.items() if tensor.data_ptr() in addresses)
