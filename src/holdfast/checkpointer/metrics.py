"""What training tells of itself, such as its loss: gathered beside the steps, handed on in batches."""

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
"""Numbers wait this long for others before they are handed on; a save takes all along that came before it."""
MAX_NAMES = 32
"""Different names in one training."""
MAX_NAME = 64
"""Characters of a name."""
THIN_AFTER = 1_000_000
"""After so many numbers of an attempt only every tenth step is recorded, after as many again every 100th."""
_MAX_BATCH = 800  # numbers; with their names they fit into one message to a keeper
_MAX_WAITING = 20_000  # numbers that nobody takes are dropped, the oldest first

Number = float | str | None
"""A finite number, "nan", "inf" or "-inf"; None where a step has no value of that name."""
Tell = Callable[[list[int], dict[str, list[Number]]], None]
"""Takes a batch: steps, and for each name a value per step."""


class Metrics:
    """Numbers by step, in the order in which they were recorded.

    Numbers on a device are read when they have come, so that no step waits for them. `num_done` is how many
    steps training has completed, as far as it was told: what is recorded meanwhile is of the next one.
    """

    def __init__(self) -> None:
        self.num_done = 0
        self._rows: deque[tuple[int, dict[str, float | Coming]]] = deque()
        self._names: set[str] = set()
        self._num_recorded = 0
        self._told_s = -math.inf
        self._lock = threading.Lock()

    def add(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """Take the numbers of a step.

        Raises:
            InvalidInput: a value is no number, a name cannot be one, or there are too many.
        """
        taken = {name: take(value, name) for name, value in values.items() if self._is_known(name)}
        stride = 10 ** (self._num_recorded // THIN_AFTER)
        if not taken or step % stride:
            return
        self._num_recorded += len(taken)
        with self._lock:
            if self._rows and self._rows[-1][0] == step:
                self._rows[-1][1].update(taken)
            else:
                self._rows.append((step, taken))
            while len(self._rows) * max(1, len(self._names)) > _MAX_WAITING:
                self._rows.popleft()

    def _is_known(self, name: str) -> bool:
        if name not in self._names:
            is_fit = 0 < len(name) <= MAX_NAME and name.isprintable()
            if not is_fit or len(self._names) >= MAX_NAMES:
                raise InvalidInput(
                    f"{name[:100]!r} cannot be recorded: a name has at most {MAX_NAME} printable "
                    f"characters, and one training at most {MAX_NAMES} names. Nothing was recorded."
                )
            self._names.add(name)
        return True

    def tell_if_due(self, tell: Tell) -> None:
        """Hand on what is here, if the last time was long enough ago or there is much of it."""
        now_s = time.monotonic()
        is_much = len(self._rows) * len(self._names) >= _MAX_BATCH
        if is_much or now_s - self._told_s >= PERIOD_S:
            self._told_s = now_s
            self.tell(tell, upto=-1)

    def tell(self, tell: Tell, *, upto: int | None = None) -> None:
        """Hand on what is here, in order; everything if nothing else is said.

        Args:
            tell: takes the batches.
            upto: do not wait for numbers of steps after this one that are still on their way.

        Blocks: for the numbers up to that step that are still on a device.
        """
        with self._lock:  # held while it is told, so that nobody overtakes
            while rows := self._next(upto):
                tell([step for step, _ in rows], _columns(rows))
                for _ in rows:
                    self._rows.popleft()

    def _next(self, upto: int | None) -> list[tuple[int, dict[str, float]]]:
        """The next rows that can be told at once."""
        found: list[tuple[int, dict[str, float]]] = []
        for step, values in islice(self._rows, max(1, _MAX_BATCH // max(1, len(self._names)))):
            must_wait = upto is None or step <= upto
            if not must_wait and not all(_is_here(value) for value in values.values()):
                break
            found.append((step, {name: _read(value) for name, value in values.items()}))
        return found


def _is_here(value: float | Coming) -> bool:
    try:
        return not isinstance(value, Coming) or value.is_here
    except RuntimeError:
        return True  # its device has failed, so it will never come


def _read(value: float | Coming) -> float:
    if not isinstance(value, Coming):
        return value
    try:
        return value.read()
    except RuntimeError:  # the device has failed; that is for the training to tell, not for its numbers
        return math.nan


def _columns(rows: list[tuple[int, dict[str, float]]]) -> dict[str, list[Number]]:
    names = dict.fromkeys(name for _, values in rows for name in values)
    return {name: [_said(values.get(name)) for _, values in rows] for name in names}


def _said(value: float | None) -> Any:
    if value is None or math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
