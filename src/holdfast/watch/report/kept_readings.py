"""Readings of homes and jobs that the requests to a server share."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from msgspec import Struct, field

from holdfast.errors import RetryLater, redact
from holdfast.system.units import format_duration

_T = TypeVar("_T")
_WAIT_S = 10.0  # time that a request waits for a reading, counted from its start


class _Reading(Struct, Generic[_T]):
    """A reading under way, or its result."""

    began_s: float
    next_s: float = 0.0
    result: Future[_T] = field(default_factory=Future)


class KeptReadings(Generic[_T]):
    """Results of readings by place, kept for a while. Each place is read by one thread at a time.

    A place that does not answer delays only the requests for it, and those only for a limited time. A result
    is kept for at least `least_age_s`, and for `rest` times as long as the reading took.
    """

    def __init__(self, *, least_age_s: float, rest: float = 0.0, max_kept: int = 1) -> None:
        self._least_age_s, self._rest, self._max_kept = least_age_s, rest, max_kept
        self._lock = threading.Lock()
        self._readings: OrderedDict[tuple[str, str], _Reading[_T]] = OrderedDict()

    def get(self, place: str, read: Callable[[], _T], *, part: str = "", wait_s: float | None = None) -> _T:
        """Return the result for a place, as it was read a moment ago.

        Blocks: while the place is read, at most `wait_s` from the start, by default 10 s.
        """
        key = place, part
        with self._lock:
            reading = self._readings.get(key)
            if reading is None or (reading.result.done() and time.monotonic() >= reading.next_s):
                reading = self._readings[key] = _Reading(time.monotonic())
                thread = threading.Thread(
                    target=self._read, args=(reading, read), name="holdfast-read", daemon=True
                )
                thread.start()
            self._readings.move_to_end(key)
            for old in [old for old, one in self._readings.items() if one.result.done()][: -self._max_kept]:
                del self._readings[old]
        wait_s = _WAIT_S if wait_s is None else wait_s
        wait([reading.result], max(0.0, reading.began_s + wait_s - time.monotonic()))
        if not reading.result.done():
            since = format_duration(time.monotonic() - reading.began_s)
            raise RetryLater(f"{redact(place)} has not answered for {since}. Ask again later.")
        return reading.result.result()

    def _read(self, reading: _Reading[_T], read: Callable[[], _T]) -> None:
        try:
            value = read()
        except BaseException as error:  # noqa: BLE001 - raised by the requests; the next one reads again
            reading.result.set_exception(error)
            return
        ended_s = time.monotonic()
        reading.next_s = ended_s + max(self._least_age_s, self._rest * (ended_s - reading.began_s))
        reading.result.set_result(value)
