"""Events of a run's history, of all attempts and ranks, by time."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from holdfast.checkpoint.home.history import Line, is_number

MEMORY, LOCAL, HOME = "memory", "local", "home"
TIERS = (MEMORY, LOCAL, HOME)  # tiers of a checkpoint, nearest first


METRICS = "metrics"  # kind of events with training metrics
Metric = tuple[str, int, float]  # value of a training metric: its name, the step, the value


class HistoryEvent(Struct, frozen=True):
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


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _amount(line: Line, name: str) -> float:
    value = line.get(name)
    return max(0, value) if isinstance(value, (int, float)) and is_number(value) else 0


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
        if _is_count(step) and (value in ("nan", "inf", "-inf") or is_number(value))
    )
