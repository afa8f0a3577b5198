"""History of a run: one line of JSON per event, in one log per attempt and rank."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.limits import MAX_LINE_BYTES
from holdfast.checkpoint.format.sealed import dumps
from holdfast.checkpoint.home.listing import WriterId
from holdfast.checkpoint.store import Store
from holdfast.errors import Corrupt, HoldfastError, NotFound
from holdfast.system.documents import decode

EVENTS = (
    "restored",
    "saved",  # save() returned; seconds are what it took from the training loop
    "staged",
    "mirrored",  # the peers of this rank hold its files in memory; seconds since the keeper received them
    "mirror-failed",  # a peer does not; recorded once until all do again
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
        """Write one event of EVENTS, or of those of a watch, and return it.

        Args:
            step: None for an event of the whole attempt.
            tier: "memory", "peers", "local" or "home"; "" where it does not apply.
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


_MAX_NEW_BYTES = 8 << 20
"""Bytes of a log that are read at a time."""
Line = dict[str, Any]
"""One line of a history log."""


def read_lines(store: Store, attempt: int | None = None) -> tuple[list[Line], int]:
    """Read all lines of a home, or of one attempt, by time, and count those that are incomplete."""
    lines: list[Line] = []
    num_torn = 0
    for entry in sorted(store.list("history/"), key=lambda entry: entry.name):
        if not entry.name.endswith(".jsonl") or attempt not in (None, names.attempt_in(entry.name)):
            continue
        found, torn = _read_log(store, entry.name)
        lines += found
        num_torn += torn
    return sorted(lines, key=lambda line: line["t"]), num_torn


def _read_log(store: Store, name: str) -> tuple[list[Line], int]:
    """Return the lines of one log, and the number of incomplete ones."""
    try:
        text = store.get(name)
    except NotFound:
        return [], 0  # deleted since it was listed
    # A keeper's successor may write its lines again.
    parsed = [_parse(one) for one in dict.fromkeys(text.splitlines())]
    lines = [line for line in parsed if line is not None]
    return lines, len(parsed) - len(lines)


def read_new_lines(store: Store, attempt: int, offsets: dict[str, int], event: str) -> list[Line]:
    """Read the new lines of one kind. `offsets` has the bytes read of each log, and is updated."""
    found: list[Line] = []
    for entry in sorted(store.list("history/"), key=lambda entry: entry.name):
        if not entry.name.endswith(".jsonl") or names.attempt_in(entry.name) != attempt:
            continue
        offset = offsets.get(entry.name, 0)
        length = min(entry.num_bytes - offset, _MAX_NEW_BYTES)
        if length <= 0:
            continue
        text = bytearray(length)
        try:
            store.read_into(entry.name, offset, memoryview(text))
        except (NotFound, Corrupt):  # deleted, or shorter, since it was listed
            continue
        whole = text.rfind(b"\n") + 1
        offsets[entry.name] = offset + (whole or (length if length == _MAX_NEW_BYTES else 0))
        found += parse_lines(bytes(text[:whole]).splitlines(), event)
    return found


def parse_lines(lines: Iterable[bytes], *events: str) -> Iterator[Line]:
    """Yield the complete lines of some kinds. Others are skipped without decoding them."""
    marks = [dumps(event) for event in events]
    for text in lines:
        if any(mark in text for mark in marks):
            line = _parse(text)
            if line is not None and line["event"] in events:
                yield line


def _parse(text: bytes) -> Line | None:
    try:
        line = decode(text, "a line", max_bytes=MAX_LINE_BYTES, any_text=True)
    except Corrupt:
        return None
    if b"\\u" in text:
        line = _printable(line)
    whole = isinstance(line, dict) and isinstance(line.get("event"), str)
    return line if whole and is_number(line.get("t")) else None


def _printable(value: object) -> Any:
    r"""Return a value with escaped bytes, such as `\xff`, in texts that are not UTF-8."""
    if isinstance(value, str):
        try:
            return value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        except UnicodeEncodeError:  # half a surrogate pair, which cannot come from a file name
            return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_printable(key): _printable(one) for key, one in value.items()}
    return [_printable(one) for one in value] if isinstance(value, list) else value


def is_number(value: object) -> bool:
    """Return True if a value of JSON is a finite number."""
    # Python's JSON accepts NaN and Infinity, which cannot be sorted.
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond any float
        return False


def is_count(value: object) -> bool:
    """Return True if a value of JSON is an integer that is not negative."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_TRAINERS = ("restored", "saved", "staged", "skipped", "dropped", "ended", "metrics")
"""Events from the trainer's own process."""
_IN_ORDER = ("preempted", "went back", "finished", "closed")
"""Ends that are no failures, as the detail of an event `ended` begins."""
_MAX_ATTEMPTS = 100
_MAX_LOG_BYTES = 16 << 20
"""Largest log that is read at the start of a training."""


class FailureRate(Struct, frozen=True):
    """Failures of a run during its training time."""

    num_failures: int  # attempts that ended without a recorded reason, or that hung
    up_s: float  # in which the attempts trained

    @property
    def mtbf_s(self) -> float | None:
        """Mean time between failures; None without any."""
        return self.up_s / self.num_failures if self.num_failures and self.up_s > 0 else None


def read_failures(store: Store, *, before: int) -> FailureRate:
    """Return the failures of the newest attempts before one, from the logs of their ranks 0."""
    logs: dict[int, str] = {}
    for entry in store.list("history/"):
        found = names.parse_record("history", entry.name)
        if found and found.rank == 0 and found.attempt < before and entry.num_bytes <= _MAX_LOG_BYTES:
            logs[found.attempt] = entry.name
    newest = sorted(logs, reverse=True)[:_MAX_ATTEMPTS]
    return count_failures(_read_log(store, logs[attempt])[0] for attempt in newest)


def count_failures(attempts: Iterable[Iterable[Mapping[str, Any]]]) -> FailureRate:
    """Return the failures of ended attempts, from the lines of each one's rank 0."""
    num_failures, up_s = 0, 0.0
    for lines in attempts:
        own = [line for line in lines if line["event"] in _TRAINERS or line["event"] == "persisted"]
        if not own:
            continue  # it never trained
        times = [line["t"] for line in own]
        up_s += max(times) - min(times)
        ends = [str(line.get("detail", "")) for line in own if line["event"] == "ended"]
        num_failures += not any(end.startswith(_IN_ORDER) for end in ends)
    return FailureRate(num_failures, up_s)
