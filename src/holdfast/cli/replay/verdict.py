"""Verdict of a replay, from comparisons with the record and between two replays; pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.cli.trials.comparison import CheckpointComparison, DifferenceRow

SOUND, DIFFERS, RANDOM = "sound", "differs", "not deterministic"
"""Verdicts: equal to the record; both replays agree, and differ from it; they differ from each other."""


@dataclass(frozen=True, slots=True)
class ReplayVerdict:
    """Verdict of a replay."""

    name: str
    differences: tuple[DifferenceRow, ...]  # from the record, or of the replays if these differ
    matches_once: bool  # one of two replays equals the record


def judge(
    record: CheckpointComparison, again: CheckpointComparison | None, between: CheckpointComparison | None
) -> ReplayVerdict:
    """Return the verdict.

    Values that differ between two replays are no evidence about the record, such as a time, or generators
    that nobody has seeded. Without them, the others are compared, unless a tensor is among them.

    Args:
        record: the first replay, compared with the record.
        again: the second replay, compared with the record; None if the first one equals it.
        between: both replays, compared with each other.
    """
    if not record.rows or again is None or between is None:
        return ReplayVerdict(SOUND, (), matches_once=False)
    if _has_tensors(between):
        return ReplayVerdict(RANDOM, between.rows, matches_once=not again.rows)
    rows = tuple(row for row in record.rows if row.key not in between.keys)
    return ReplayVerdict(DIFFERS if rows else SOUND, rows, matches_once=False)


def _has_tensors(found: CheckpointComparison) -> bool:
    return any(not row.key.startswith("rng.") and row.is_tensor for row in found.rows)


@dataclass(frozen=True, slots=True)
class MetricDifference:
    """First recorded metric that differs between a run and its replay."""

    step: int
    name: str
    recorded: float
    replayed: float


def first_difference(
    recorded: Mapping[int, Mapping[str, float]], replayed: Mapping[int, Mapping[str, float]]
) -> MetricDifference | None:
    """Return the first metric that differs; None if all that both have are equal.

    Args:
        recorded: by step and name.
        replayed: the same, of the replay.
    """
    for step in sorted(recorded.keys() & replayed.keys()):
        for name in sorted(recorded[step].keys() & replayed[step].keys()):
            one, other = recorded[step][name], replayed[step][name]
            if one != other and not (math.isnan(one) and math.isnan(other)):
                return MetricDifference(step, name, one, other)
    return None
