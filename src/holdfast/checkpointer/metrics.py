"""Training metrics such as the loss: collected during steps, sent to the keeper in batches."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, SupportsFloat

from holdfast.errors import InvalidInput
from holdfast.stage import Coming, take

PERIOD_S = 2.0
"""Longest time between two batches. A save sends everything that was recorded before it."""
MAX_NAMES = 32
"""Maximum number of names in one training."""
MAX_NAME = 64
"""Maximum length of a name, in characters."""
THIN_AFTER = 1_000_000
"""Values after which only every tenth step of an attempt is recorded, after as many again every 100th."""
_MAX_BATCH = 800  # values; with their names they fit into one message to a keeper
_MAX_WAITING = 20_000  # values that no keeper has received; older ones are dropped

Number = float | str | None
"""A finite number, "nan", "inf" or "-inf"; None where a step has no value of that name."""
Send = Callable[[list[int], dict[str, list[Number]]], None]
"""Function that sends a batch: steps, and for each name a value per step."""


class Metrics:
    """Buffer of metrics by step, in the order of recording.

    A value on a device is read once it has arrived on the host, so that no step waits for it.

    Attributes:
        num_done: newest step that is known to be complete; what is recorded now belongs to the next one.
    """

    def __init__(self) -> None:
        self.num_done = 0
        self._rows: deque[tuple[int, dict[str, float | Coming]]] = deque()
        self._names: set[str] = set()
        self._num_recorded = 0
        self._sent_s = -math.inf
        self._lock = threading.Lock()

    def add(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """Add the values of a step.

        Raises:
            InvalidInput: a value is not a number, a name is not valid, or there are too many.
        """
        numbers = {name: take(value, name) for name, value in values.items() if self._check_name(name)}
        stride = 10 ** (self._num_recorded // THIN_AFTER)
        if not numbers or step % stride:
            return
        self._num_recorded += len(numbers)
        with self._lock:
            if self._rows and self._rows[-1][0] == step:
                self._rows[-1][1].update(numbers)
            else:
                self._rows.append((step, numbers))
            while len(self._rows) * max(1, len(self._names)) > _MAX_WAITING:
                self._rows.popleft()

    def _check_name(self, name: str) -> bool:
        if name not in self._names:
            is_fit = 0 < len(name) <= MAX_NAME and name.isprintable()
            if not is_fit or len(self._names) >= MAX_NAMES:
                raise InvalidInput(
                    f"{name[:100]!r} cannot be recorded: a name has at most {MAX_NAME} printable "
                    f"characters, and one training at most {MAX_NAMES} names. Nothing was recorded."
                )
            self._names.add(name)
        return True

    def flush_if_due(self, send: Send) -> None:
        """Send what has arrived, if a batch is full or due."""
        now_s = time.monotonic()
        is_much = len(self._rows) * len(self._names) >= _MAX_BATCH
        if is_much or now_s - self._sent_s >= PERIOD_S:
            self._sent_s = now_s
            self.flush(send, upto=-1)

    def flush(self, send: Send, *, upto: int | None = None) -> None:
        """Send what was recorded, in order.

        Args:
            send: function that sends a batch.
            upto: send later steps only as far as their values have arrived; None to wait for all.

        Blocks: for the values up to that step that are still on a device.
        """
        with self._lock:  # held while sending, which keeps the order
            while rows := self._next(upto):
                send([step for step, _ in rows], _columns(rows))
                for _ in rows:
                    self._rows.popleft()

    def _next(self, upto: int | None) -> list[tuple[int, dict[str, float]]]:
        """Return the next rows that can be sent at once."""
        found: list[tuple[int, dict[str, float]]] = []
        for step, values in islice(self._rows, max(1, _MAX_BATCH // max(1, len(self._names)))):
            must_wait = upto is None or step <= upto
            if not must_wait and not all(_has_arrived(value) for value in values.values()):
                break
            found.append((step, {name: _read(value) for name, value in values.items()}))
        return found


def _has_arrived(value: float | Coming) -> bool:
    try:
        return not isinstance(value, Coming) or value.is_here
    except RuntimeError:
        return True  # its device has failed, so it never arrives


def _read(value: float | Coming) -> float:
    if not isinstance(value, Coming):
        return value
    try:
        return value.read()
    except RuntimeError:  # the device has failed, which training raises by itself
        return math.nan


def _columns(rows: list[tuple[int, dict[str, float]]]) -> dict[str, list[Number]]:
    names = dict.fromkeys(name for _, values in rows for name in values)
    return {name: [_encode(values.get(name)) for _, values in rows] for name in names}


def _encode(value: float | None) -> Any:
    if value is None or math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
