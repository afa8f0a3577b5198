"""Thread that deletes old checkpoints, since a file system may take seconds to free gigabytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from holdfast.checkpoint.home.retain import Deleted
from holdfast.checkpoint.keeper.reports import Reports
from holdfast.checkpoint.store import Store

_PAUSE_S = 0.25
"""Pause between two runs: each lists the home, which is too slow to do for every save of a fast series."""


class RetentionThread:
    """Runs retention in the background. Requests during a run and its pause result in a single further run.

    Args:
        apply: deletes what the policy does not keep.
    """

    def __init__(self, apply: Callable[[], None]) -> None:
        self._apply = apply
        self._is_due = False
        self._lock = threading.Lock()
        self._is_awaited = threading.Event()  # `join` does not wait for a pause
        self._thread: threading.Thread | None = None

    def request(self) -> None:
        """Start a run, or another one after the current run."""
        with self._lock:
            self._is_due = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="holdfast-retain")
                self._thread.start()

    def join(self) -> None:
        """Wait for all requested runs."""
        self._is_awaited.set()
        try:
            while (thread := self._thread) is not None:
                thread.join()
        finally:
            self._is_awaited.clear()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._is_due:
                    self._thread = None
                    return
                self._is_due = False
            self._apply()
            self._is_awaited.wait(_PAUSE_S)


def delete_old(store: Store, old: Iterable[Deleted], reports: Reports, tier: str) -> None:
    """Delete old checkpoints and what interrupted writes have left, and record each deletion."""
    for checkpoint in old:
        reports.deleted(checkpoint, tier)
    for folder in ("step-", "attempts/"):  # the first of them also sweeps the root
        store.sweep(folder)
