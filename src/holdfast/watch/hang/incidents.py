"""Hangs of a run, put together from what each rank has recorded; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.watch.hang.evidence import EVENT, RankEvidence, decode
from holdfast.watch.hang.grouping import PlaceGroup, group_ranks

OVER = "hang-over"
"""Kind of the event of a rank that makes progress again."""
_TOGETHER_S = 120.0
"""Longest time between the records of two ranks about one hang, beyond its own duration."""


@dataclass(frozen=True, slots=True)
class HangIncident:
    """Hang of a run.

    Attributes:
        attempt: its attempt.
        unix_s: time of the first record.
        ranks: evidence of each rank that has some.
        over_s: its duration in seconds, if the training made progress again; else None.
    """

    attempt: int
    unix_s: float
    ranks: tuple[RankEvidence, ...]
    over_s: float | None = None

    @property
    def groups(self) -> list[PlaceGroup]:
        """Ranks at the same place, those that the others wait for first."""
        return group_ranks(self.ranks)


def list_hangs(lines: Iterable[Mapping[str, Any]]) -> list[HangIncident]:
    """Return the hangs in lines of a history, which are ordered by time; the oldest first."""
    open_by_attempt: dict[int, list[Mapping[str, Any]]] = {}
    found: list[HangIncident] = []

    def end(attempt: int, over_s: float | None) -> None:
        if records := open_by_attempt.pop(attempt, None):
            found.append(_incident(attempt, records, over_s))

    for line in lines:
        attempt = line.get("attempt")
        if not isinstance(attempt, int):
            continue
        if line.get("event") == OVER:
            end(attempt, float(line["seconds"]) if isinstance(line.get("seconds"), (int, float)) else None)
        elif line.get("event") == EVENT and (one := decode(line)) is not None:
            records = open_by_attempt.get(attempt)
            if records and line["t"] - records[0]["t"] > _TOGETHER_S + one.stalled_s:
                end(attempt, None)
            open_by_attempt.setdefault(attempt, []).append(line)
    for attempt in sorted(open_by_attempt):
        end(attempt, None)
    return sorted(found, key=lambda one: one.unix_s)


def _incident(attempt: int, records: list[Mapping[str, Any]], over_s: float | None) -> HangIncident:
    by_rank: dict[int, RankEvidence] = {}
    for line in records:
        one = decode(line)
        if one is not None and not (one.rank in by_rank and by_rank[one.rank].is_late and not one.is_late):
            by_rank[one.rank] = one
    return HangIncident(attempt, records[0]["t"], tuple(by_rank[rank] for rank in sorted(by_rank)), over_s)
