"""Newest step of a killed trainer: read from its pulse, and recorded in the history."""

from __future__ import annotations

import contextlib
import time

from holdfast.checkpoint.home.history import History
from holdfast.checkpoint.keeper.pulse import PulseReader
from holdfast.errors import HoldfastError


class KilledStep:
    """Recorder of the newest step of a trainer that ends without recording it.

    Args:
        pulse: pulse of the trainer, if it has one.
        history: receives the event.
    """

    def __init__(self, pulse: PulseReader | None, history: History) -> None:
        self._pulse, self._history = pulse, history

    def record(self) -> None:
        """Record the newest completed step, at the time of its completion; once."""
        pulse, self._pulse = self._pulse, None
        if pulse is None:
            return
        progress = pulse.read()
        pulse.close()
        if progress.beats_here < 1:
            return  # no step was completed, or a loop of its own counts them
        since_s = (time.monotonic_ns() - progress.beat_ns) / 1e9
        self._history.record(
            "killed",
            step=progress.step,
            unix_s=time.time() - since_s,
            detail="the trainer ended without recording its end; this was its newest completed step",
        )
        with contextlib.suppress(HoldfastError):
            self._history.store.flush()
