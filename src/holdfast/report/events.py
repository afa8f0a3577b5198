"""Events of a run's history, of all attempts and ranks, by time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from holdfast.documents import decode
from holdfast.errors import Corrupt, NotFound
from holdfast.format.limits import MAX_LINE_BYTES
from holdfast.store import Store

Line = dict[str, Any]
"""One line of a history log."""

MEMORY, LOCAL, HOME = "memory", "local", "home"
TIERS = (MEMORY, LOCAL, HOME)
"""Tiers of a checkpoint, nearest first."""


METRICS = "metrics"
"""Kind of events with training metrics."""
Metric = tuple[str, int, float]
"""Value of a training metric: its name, the step, the value."""


@dataclass(frozen=True, slots=True)
class HistoryEvent:
    """One event. Missing members of its line have default values."""

    unix_s: float
    kind: str
    step: int | None = None
    attempt: int = 0
    rank: int = 0
    tier: str = HOME
    num_bytes: int = 0
    seconds: float = 0.0
    detail: str = ""
    numbers: tuple[Metric, ...] = ()  # of metrics

    @classmethod
    def from_line(cls, line: Line) -> HistoryEvent:
        """Return the event of a line. Members of a wrong type count as missing."""
        step = line.get("step")
        return cls(
            float(line["t"]),
            line["event"],
            step if _is_count(step) else None,
            attempt=int(_amount(line, "attempt")),
            rank=int(_amount(line, "rank")),
            tier=tier_of(line),
            num_bytes=int(_amount(line, "bytes")),
            seconds=_amount(line, "seconds"),
            detail=str(line.get("detail") or ""),
            numbers=_numbers(line) if line["event"] == METRICS else (),
        )


def tier_of(line: Line) -> str:
    """Return the tier of a line. Lines from before tiers existed are about home."""
    tier = line.get("tier")
    return tier if isinstance(tier, str) and tier else HOME


def parse_events(lines: Iterable[Line]) -> list[HistoryEvent]:
    """Parse lines into events, sorted by time."""
    return sorted((HistoryEvent.from_line(line) for line in lines), key=lambda event: event.unix_s)


def read_lines(store: Store) -> tuple[list[Line], int]:
    """Read all lines of a home by time, and count those that are incomplete.

    Raises:
        RetryLater: the store failed.
    """
    lines: list[Line] = []
    num_torn = 0
    for entry in sorted(store.list("history/"), key=lambda entry: entry.name):
        if not entry.name.endswith(".jsonl"):
            continue
        try:
            text = store.get(entry.name)
        except NotFound:
            continue  # deleted since it was listed
        for one in dict.fromkeys(text.splitlines()):  # a keeper's successor may write its lines again
            line = _parse(one)
            if line is None:
                num_torn += 1
            else:
                lines.append(line)
    return sorted(lines, key=lambda line: line["t"]), num_torn


def _parse(text: bytes) -> Line | None:
    try:
        line = decode(text, "a line", max_bytes=MAX_LINE_BYTES, any_text=True)
    except Corrupt:
        return None
    if b"\\u" in text:
        line = _printable(line)
    whole = isinstance(line, dict) and isinstance(line.get("event"), str)
    return line if whole and _is_number(line.get("t")) else None


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


def _is_number(value: object) -> bool:
    # Python's JSON accepts NaN and Infinity, which cannot be sorted.
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond any float
        return False


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _amount(line: Line, name: str) -> float:
    value = line.get(name)
    return max(0, value) if isinstance(value, (int, float)) and _is_number(value) else 0


def _numbers(line: Line) -> tuple[Metric, ...]:
    """Return the valid metric values of a line."""
    steps, values = line.get("steps"), line.get("values")
    if not isinstance(steps, list) or not isinstance(values, dict):
        return ()
    return tuple(
        (name, step, float(value))
        for name, column in values.items()
        if isinstance(column, list)
        for step, value in zip(steps, column, strict=False)
        if _is_count(step) and (value in ("nan", "inf", "-inf") or _is_number(value))
    )
