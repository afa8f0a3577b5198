"""Retention of a tier, usually in a thread, since a file system may take seconds to free gigabytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.part import Ancestors
from holdfast.checkpoint.home.retain import Retention
from holdfast.checkpoint.keeper.reports import Reports, bugs_as_errors
from holdfast.errors import HoldfastError

_PAUSE_S = 0.25
"""Pause between two runs: each lists the home, which is too slow to do for every save of a fast series."""


class TierRetention:
    """Retention of one tier, as of its newest complete checkpoint. Errors and deletions are reported.

    Requests during a run and its pause result in a single further run.

    Args:
        retention: of the tier, of this name.
        needed: returns the checkpoints that stay whatever the policy.
        deletes: False for a rank that leaves all deletions to another one.
    """

    def __init__(
        self,
        retention: Retention,
        tier: str,
        reports: Reports,
        needed: Callable[[], Collection[CheckpointId]],
        *,
        deletes: bool = True,
    ) -> None:
        self._retention, self._tier, self._reports, self._needed = retention, tier, reports, needed
        self._deletes = deletes
        self._newest: tuple[CheckpointId, Ancestors] | None = None
        self._is_due = False
        self._lock = threading.Lock()
        self._is_awaited = threading.Event()  # `join` does not wait for a pause
        self._thread: threading.Thread | None = None

    @property
    def newest(self) -> CheckpointId | None:
        """Newest checkpoint that was added, not always the last one."""
        return None if self._newest is None else self._newest[0]

    def add(self, checkpoint: CheckpointId, ancestors: Ancestors = ()) -> bool:
        """Add a checkpoint that is complete in the tier. Return False if a newer one was added before."""
        is_newest = self._newest is None or checkpoint > self._newest[0]
        if is_newest:
            self._newest = checkpoint, ancestors
        return is_newest

    @property
    def _may_delete(self) -> bool:
        """True if a new checkpoint, or a request, may have made others superfluous."""
        return self._deletes and self._newest is not None and self._retention.is_due

    def run(self, step: int | None = None) -> None:
        """Delete what is superfluous now, and what interrupted writes have left.

        Args:
            step: the one after which errors are reported; the newest by default.
        """
        if not self._may_delete:
            return
        assert self._newest is not None
        newest, ancestors = self._newest
        step = newest.step if step is None else step
        try:
            with bugs_as_errors(f"Step {step}"):
                for deleted in self._retention.apply(newest, ancestors, self._needed()):
                    self._reports.deleted(deleted, self._tier)
                for folder in ("step-", "attempts/"):  # the first of them also sweeps the root
                    self._retention.store.sweep(folder)
        except HoldfastError as error:  # the next run deletes what is left
            self._reports.warn("not-deleted", step, error, tier=self._tier)

    def request(self) -> None:
        """Start a run in the background, or another one after the current run. Threads may call this."""
        if not self._may_delete:
            return
        with self._lock:
            self._is_due = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run_requested, name="holdfast-retain")
                self._thread.start()

    def delete(self, step: int) -> None:
        """Delete the checkpoints of a step, once a newer one is complete."""
        self._retention.unwanted.add(step)
        self.request()

    def join(self) -> None:
        """Wait for all requested runs."""
        self._is_awaited.set()
        try:
            while (thread := self._begun_thread()) is not None:
                thread.join()
        finally:
            self._is_awaited.clear()

    def _begun_thread(self) -> threading.Thread | None:
        with self._lock:  # else it may not be started yet, and cannot be joined
            return self._thread

    def _run_requested(self) -> None:
        while True:
            with self._lock:
                if not self._is_due:
                    self._thread = None
                    return
                self._is_due = False
            self.run()
            self._is_awaited.wait(_PAUSE_S)
