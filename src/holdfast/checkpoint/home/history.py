"""History of a run: one line of JSON per event, in one log per attempt and rank."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.sealed import dumps
from holdfast.checkpoint.home.writer import WriterId
from holdfast.checkpoint.store import Store
from holdfast.errors import HoldfastError

EVENTS = (
    "restored",
    "saved",  # save() returned; seconds are what it took from the training loop
    "staged",
    "persisted",
    "committed",  # complete in its tier; the detail may name another attempt, whose it is
    "drained",  # complete in home too; as above
    "drain-failed",
    "retained",
    "skipped",
    "dropped",
    "failed",
    "paused",  # training waited until the step was durable; seconds, and the detail has the cause
    "fenced",
    "unhealthy",  # a committed checkpoint of a state that is not healthy; the detail has the reasons
    "rollback",  # to the step of a healthy checkpoint; the detail has the skipped batches
    "no-rollback",  # training should have gone back, and there is no healthy checkpoint
    "tear-check",  # by which means torn copies are found; the detail names it
    "ended",  # of an attempt that ended in order; the detail begins with the kind of end
    "killed",  # of a trainer that recorded no end; by its keeper, with its newest step and that time
    "retain-failed",
    "interval",  # between saves, chosen by `every="auto"`; seconds, and the detail has the reason
    "watch-off",  # a watch of the run has failed, and is off; the detail names it
    "metrics",  # of training, such as its loss; with members `steps` and `values`
)
"""Kinds of events of the core. Watches have more, see `holdfast.checkpoint.watch.Watch.events`."""


class History:
    """Log of one writer. A failure to append is kept in `trouble`, and never stops a save.

    Lines of several threads may alternate; each line is whole.
    """

    def __init__(self, store: Store, writer: WriterId) -> None:
        self.store = store
        self.writer = writer
        self.trouble: str | None = None
        self._has_metrics = False  # recorded since `settle`

    def record(
        self,
        event: str,
        *,
        step: int | None,
        num_bytes: int = 0,
        seconds: float = 0.0,
        detail: str = "",
        tier: str = "",
        unix_s: float | None = None,
        members: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Write one event and return it.

        Args:
            event: one of EVENTS, or of those of a watch.
            step: of the event; None for an event of the whole attempt.
            detail: text for people.
            tier: "memory", "local" or "home"; "" where it does not apply.
            unix_s: time of the event; now by default.
        """
        line = {
            "t": round(time.time() if unix_s is None else unix_s, 6),
            "event": event,
            "step": step,
            "attempt": self.writer.attempt,
            "rank": self.writer.rank,
            "bytes": num_bytes,
            "seconds": round(seconds, 6),
            "detail": detail,
            "tier": tier,
            **(members or {}),
        }
        self._has_metrics |= event == "metrics"
        try:
            self.store.append(names.history(self.writer.attempt, self.writer.rank), dumps(line) + b"\n")
        except HoldfastError as error:
            self.trouble = str(error)
        return line

    def settle(self) -> None:
        """Flush metrics so that they survive this process, on stores where appending alone does not.

        Called before a commit: afterwards the trainer does not send them again.
        """
        if not self._has_metrics:
            return
        self._has_metrics = False
        try:
            self.store.flush()
        except HoldfastError as error:
            self.trouble = str(error)
