"""Training metrics such as the loss: collected during steps, sent to the keeper in batches."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Protocol, SupportsFloat

from msgspec import Struct

from holdfast.checkpoint.format.run import encode_metric
from holdfast.checkpoint.home.metrics import SaveValues
from holdfast.checkpoint.stage import PendingScalar, copy_scalar
from holdfast.errors import InvalidInput

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


class Receiver(Protocol):
    """Receiver of recorded metrics."""

    def send_metrics(self, steps: list[int], values: Mapping[str, Sequence[Number]]) -> None:
        """Receive a batch: steps, and for each name a value per step."""
        ...

    def update_metrics(self, step: int, metrics: SaveValues) -> None:
        """Receive the metrics of a save that were recorded after it was submitted."""
        ...


_Row = tuple[int, int, dict[str, float]]
"""Step of the values, step of the save that they are about, and the values."""


class MetricsBuffer:
    """Buffer of metrics by step, in the order of recording.

    A value on a device is read once it has arrived on the host, so that no step waits for it.

    Attributes:
        num_done: newest step that is known to be complete; what is recorded now belongs to the next one.
    """

    def __init__(self) -> None:
        self.num_done = 0
        self._rows: deque[tuple[int, int, dict[str, float | PendingScalar]]] = deque()  # step, save's step
        self._saves = SaveMetrics()
        self._new: deque[tuple[int, dict[str, float]]] = deque(maxlen=_MAX_WAITING)  # see `take_new`
        self._num_taken = 0  # rows, from the first, that `take_new` has returned
        self._names: set[str] = set()
        self._num_recorded = 0
        self._sent_s = -math.inf
        self._lock = threading.Lock()

    def restart(self, step: int) -> None:
        """Continue from `step`, which was restored: what is recorded now belongs to the next one."""
        with self._lock:
            self.num_done, self._saves = step, SaveMetrics()

    def take_new(self) -> list[tuple[int, dict[str, float]]]:
        """Return the values of complete steps that have arrived since the call before, and the steps."""
        with self._lock:
            found = list(self._new)
            self._new.clear()
            for step, _, values in islice(self._rows, self._num_taken, None):
                if step > self.num_done or not all(map(_has_arrived, values.values())):
                    break
                found.append((step, _read_all(values)))
                self._num_taken += 1
            return found

    def begin_save(self, step: int) -> None:
        """Record that a save of `step` begins."""
        with self._lock:
            self.num_done = step
            self._saves.begin_save(step)

    @contextlib.contextmanager
    def of_save(self, step: int) -> Iterator[SaveValues]:
        """Yield the metrics of a save to the block that submits the save. Call `flush` for the step first."""
        with self._lock:  # a change that overtook its save would be of a save that the keeper does not know
            yield self._saves.send(step)

    def value_of_save(self, step: int, metric: str | None) -> float | None:
        """Return the value of a metric that a save has so far; None without one."""
        with self._lock:
            known = self._saves.value(step, metric or "")
            return None if known is None else known[1]

    def unsaved_step(self, step: int, metric: str) -> int | None:
        """Return the step of a save's metric, if that step was not saved."""
        with self._lock:
            known = self._saves.value(step, metric)
            return None if known is None or self._saves.has(known[0]) else known[0]

    def add(self, step: int, values: Mapping[str, SupportsFloat], *, of_save: int | None = None) -> None:
        """Add the values of a step, which are about the save of the step by default."""
        numbers = {name: copy_scalar(value, name) for name, value in values.items() if self._check_name(name)}
        stride = 10 ** (self._num_recorded // THIN_AFTER)
        if not numbers or step % stride:
            return
        self._num_recorded += len(numbers)
        with self._lock:
            key = step, step if of_save is None else of_save
            if self._rows and self._rows[-1][:2] == key:
                self._rows[-1][2].update(numbers)
            else:
                self._rows.append((*key, numbers))
            if key[1] <= self._saves.newest:
                self._sent_s = -math.inf  # a save waits for them
            while len(self._rows) * max(1, len(self._names)) > _MAX_WAITING:
                self._drop_first()

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

    def flush_if_due(self, receiver: Receiver) -> None:
        """Send what has arrived, if a batch is full or due."""
        now_s = time.monotonic()
        is_much = len(self._rows) * len(self._names) >= _MAX_BATCH
        if is_much or now_s - self._sent_s >= PERIOD_S:
            self._sent_s = now_s
            self.flush(receiver, upto=-1)

    def flush(self, receiver: Receiver, *, upto: int | None = None) -> None:
        """Send what was recorded, in order; later steps than `upto` only as far as their values have arrived.

        Blocks: for the values up to that step that are still on a device.
        """
        with self._lock:  # held while sending, which keeps the order
            while rows := self._next(upto):
                receiver.send_metrics([step for step, _, _ in rows], _columns(rows))
                self._new += [(step, values) for step, _, values in rows[self._num_taken :]]
                for _ in rows:
                    self._drop_first()
                changed = [self._saves.add(of_save, values) for _, of_save, values in rows]
                for step in sorted({step for step in changed if step is not None}):
                    receiver.update_metrics(step, self._saves.send(step))

    def _drop_first(self) -> None:
        self._rows.popleft()
        self._num_taken = max(0, self._num_taken - 1)

    def _next(self, upto: int | None) -> list[_Row]:
        """Return the next rows that fit into one batch."""
        found: list[_Row] = []
        for step, of_save, values in islice(self._rows, max(1, _MAX_BATCH // max(1, len(self._names)))):
            must_wait = upto is None or step <= upto
            if not must_wait and not all(_has_arrived(value) for value in values.values()):
                break
            found.append((step, of_save, _read_all(values)))
        return found


def _has_arrived(value: float | PendingScalar) -> bool:
    try:
        return not isinstance(value, PendingScalar) or value.is_ready
    except RuntimeError:
        return True  # its device has failed, so it never arrives


def _read_all(values: Mapping[str, float | PendingScalar]) -> dict[str, float]:
    return {name: _read(value) for name, value in values.items()}


def _read(value: float | PendingScalar) -> float:
    if not isinstance(value, PendingScalar):
        return value
    try:
        return value.read()
    except RuntimeError:  # the device has failed, which training raises by itself
        return math.nan


def _columns(rows: list[_Row]) -> dict[str, list[Number]]:
    names = dict.fromkeys(name for _, _, values in rows for name in values)
    return {name: [encode_metric(row[2][name]) if name in row[2] else None for row in rows] for name in names}


_MAX_SAVES = 256  # newest saves whose metrics may still change


class _SavedValues(Struct):
    """Metrics of one save."""

    values: dict[str, tuple[int, float]] = {}  # name -> step of the value, value
    is_sent: bool = False


class SaveMetrics:
    """Metrics of the newest saves of an attempt.

    For each name a save gets the value of its own step, else the newest value since the save before. The time
    of recording does not matter: a value may come after the save.

    Attributes:
        newest: step of the newest save; -1 before the first.
    """

    def __init__(self) -> None:
        self.newest = -1
        self._saves: dict[int, _SavedValues] = {}  # by step, ascending
        self._next: dict[str, tuple[int, float]] = {}  # since the newest save

    def begin_save(self, step: int) -> None:
        """Add a save, which gets what was recorded since the one before. One of the same step is replaced."""
        if step < self.newest:
            return
        before = self._saves.get(self.newest)
        if step == self.newest and before is not None:  # the save before has failed
            before.is_sent = False
            return
        # What the save before has not sent is kept for this one: that save may have failed.
        saved = _SavedValues({} if before is None or before.is_sent else dict(before.values))
        later: dict[str, tuple[int, float]] = {}
        for name, known in self._next.items():
            (saved.values if known[0] <= step else later)[name] = known
        self.newest, self._next, self._saves[step] = step, later, saved
        if len(self._saves) > _MAX_SAVES:
            self._saves.pop(next(iter(self._saves)))

    def add(self, step: int, values: Mapping[str, float]) -> int | None:
        """Add values of a step. Returns the step of the save that they changed after `send`, if any."""
        at = next((saved for saved in self._saves if saved >= step), None)
        if at is None:
            self._put(self._next, step, values)
            return None
        is_oldest = len(self._saves) == _MAX_SAVES and at == next(iter(self._saves))
        if is_oldest and step != at:
            return None  # of a save that is not known any more
        is_changed = self._put(self._saves[at].values, step, values)
        return at if is_changed and self._saves[at].is_sent else None

    @staticmethod
    def _put(known: dict[str, tuple[int, float]], step: int, values: Mapping[str, float]) -> bool:
        newer = {name: (step, value) for name, value in values.items() if known.get(name, (-1,))[0] <= step}
        is_changed = any(known.get(name) != one for name, one in newer.items())
        known.update(newer)
        return is_changed

    def value(self, step: int, name: str) -> tuple[int, float] | None:
        """Return the step and the number of one value of a save; None if it was not recorded."""
        return self._saves[step].values.get(name) if step in self._saves else None

    def send(self, step: int) -> SaveValues:
        """Return the metrics of a save. Later changes are reported by `add`."""
        saved = self._saves.get(step)
        if saved is None:
            return SaveValues()
        saved.is_sent = True
        values = {name: value for name, (_, value) in saved.values.items()}
        return SaveValues(values, {name: at for name, (at, _) in saved.values.items() if at != step})

    def has(self, step: int) -> bool:
        """Return True for the step of a save."""
        return step in self._saves
