"""The run's history: one line of JSON per event, in a log of this attempt and rank."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.format import names
from holdfast.format.sealed import dumps
from holdfast.keeper.terms import Terms
from holdfast.store import Store

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
    "fenced",
    "tear-check",  # by which means torn copies are found; the detail names it
    "ended",  # of an attempt that could tell; the detail begins with how
    "retain-failed",
    "metrics",  # what training told of itself; with members `steps` and `values`
)
"""Every kind of event there is."""


class History:
    """Appends events. If it cannot be written, that is told to the trainer once and never stops a save.

    Events of several threads may mix, but not within a line.
    """

    def __init__(self, store: Store, terms: Terms) -> None:
        self.store = store
        self.terms = terms
        self.trouble: str | None = None
        self._has_metrics = False  # that were told since `settle`

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
            event: one of EVENTS.
            step: that it is about.
            num_bytes: that were moved.
            seconds: that it took.
            detail: in words.
            tier: "memory", "local" or "home"; "" where that says nothing.
            unix_s: when it happened, if that was not now.
            members: of the line, beside these.
        """
        line = {
            "t": round(time.time() if unix_s is None else unix_s, 6),
            "event": event,
            "step": step,
            "attempt": self.terms.attempt,
            "rank": self.terms.rank,
            "bytes": num_bytes,
            "seconds": round(seconds, 6),
            "detail": detail,
            "tier": tier,
            **(members or {}),
        }
        self._has_metrics |= event == "metrics"
        try:
            self.store.append(names.history(self.terms.attempt, self.terms.rank), dumps(line) + b"\n")
        except HoldfastError as error:
            self.trouble = str(error)
        return line

    def settle(self) -> None:
        """See that the metrics told so far outlive this process, where appending alone does not.

        For what has to be told before a checkpoint is complete: nobody could tell it again afterwards.
        """
        if not self._has_metrics:
            return
        self._has_metrics = False
        try:
            self.store.flush()
        except HoldfastError as error:
            self.trouble = str(error)
