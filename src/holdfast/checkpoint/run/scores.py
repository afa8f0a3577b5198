"""Scores of the saves of an attempt, exchanged so that all ranks find the best; pure."""

from __future__ import annotations

import math
import struct
from collections import deque

from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.retention import Keep, best_first

_NO_SCORE = (1 << 63) - 1  # the greatest number that is exchanged; as a float it is NaN


class Scores:
    """One rank's side of finding the best saves of an attempt.

    Rank 0 alone has metrics. In each exchange it sends the value of the last save as an integer of the same
    bits. The others send the greatest integer, so that the lowest one is rank 0's.

    Args:
        is_alone: there is one rank, which receives its own number at once instead of one exchange later.
    """

    def __init__(self, keep: Keep, *, is_alone: bool) -> None:
        self._keep = keep
        self._values: dict[CheckpointId, float] = {}  # of attempt 0, as all are of one
        self._best: list[int] = []
        self._sent: deque[int | None] = deque() if is_alone else deque([None])

    @property
    def best(self) -> list[int]:
        """Steps of the best saves, best first."""
        return self._best

    def send(self, step: int | None, value: float | None) -> int:
        """Return the number to send.

        Args:
            step: of the last save; None before the first.
            value: its metric; None on other ranks than 0, and without one.
        """
        self._sent.append(step)
        if self._keep.best is None or value is None or not math.isfinite(value):
            return _NO_SCORE
        return struct.unpack("<q", struct.pack("<d", value + 0.0))[0]  # -0.0 has no negative

    def receive(self, number: int) -> list[int] | None:
        """Process a received number. Return the steps of the best saves if they have changed."""
        step = self._sent.popleft()
        value = struct.unpack("<d", struct.pack("<q", number))[0]
        if step is None or self._keep.best is None or not math.isfinite(value):
            return None
        self._values[CheckpointId(attempt=0, step=step)] = value
        ordered = best_first(self._values, self._values, self._keep.mode)
        before, self._best = self._best, [one.step for one in ordered[: self._keep.best]]
        return self._best if set(self._best) != set(before) else None
