"""Done marker: the object in home that records that the run has finished."""

from __future__ import annotations

import time

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format import run as runs
from holdfast.checkpoint.store import Store
from holdfast.errors import HoldfastError


class DoneMarker:
    """Durable record that the run has finished; an exit status alone may be lost.

    Args:
        rank: this rank. Only rank 0 reads and writes the marker.
    """

    def __init__(self, home: Store, *, rank: int) -> None:
        self._home, self._is_first = home, rank == 0
        self._found: runs.Done | None = None

    @property
    def step(self) -> int | None:
        """Final step of the run, as the marker was read; None without one."""
        return None if self._found is None else self._found.step

    def read(self) -> None:
        """Read the marker. One that cannot be read counts as missing: `write` replaces it."""
        self._found = None
        if self._is_first:
            try:
                self._found = runs.parse(runs.Done, self._home.get(names.DONE), names.DONE)
            except HoldfastError:  # it only selects a line of text
                return

    def write(self, run: str, attempt: int, step: int) -> None:
        """Mark the run as finished at `step`."""
        if self._is_first and self.step != step:
            done = runs.Done(run, attempt, step, finished_unix_s=time.time())
            self._home.put(names.DONE, runs.document(done))

    def delete(self) -> None:
        """Delete the marker, if it was read: the run is trained further."""
        if self._found is not None:
            self._home.delete(names.DONE)
            self._found = None
