"""Training metrics by step: the values that count, and those that were discarded; pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct

from holdfast.checkpoint.format.names import CheckpointId
from holdfast.watch.report.saves import METRICS, HistoryEvent, checkpoint_of, named_attempt


class Point(Struct, frozen=True):
    """One value of one step."""

    step: int
    attempt: int
    value: float


class Curve(Struct, frozen=True):
    """All values of one metric."""

    name: str
    counted: tuple[Point, ...]  # by step, each at most once: the history of the current state
    lost: tuple[tuple[Point, ...], ...]  # discarded by interruptions, each of one attempt

    @property
    def points(self) -> list[Point]:
        """All values, those that count first."""
        return [*self.counted, *(point for stretch in self.lost for point in stretch)]

    @property
    def has_one_value(self) -> bool:
        """True if all values are the same, so that a chart would show nothing."""
        return len({str(point.value) for point in self.points}) == 1


class _Stretch(Struct):
    """Training of one attempt since a restore."""

    attempt: int
    base: int = -1  # restored step; -1: started from scratch
    source: int | None = None  # index of the stretch that trained the restored step
    numbers: dict[str, dict[int, float]] = {}
    counts_upto: float = -math.inf


def collect_curves(events: Iterable[HistoryEvent], saves: Iterable[CheckpointId] = ()) -> list[Curve]:
    """Return the curves of all metrics, in the order of their first values.

    A value counts if it is part of the history of the current state: from the newest attempt back to its
    restored step, from there back to the source of that checkpoint, and so on. All saves are needed for
    restores without a recorded source.
    """
    stretches = _stretches(events, sorted(saves))
    upto: float = math.inf
    at = len(stretches) - 1 if stretches else None
    while at is not None:
        stretch = stretches[at]
        stretch.counts_upto = upto
        upto, at = min(upto, stretch.base), stretch.source  # a source is always earlier
    names = dict.fromkeys(name for one in stretches for name in one.numbers)
    return [_curve(name, stretches) for name in names]


def _stretches(events: Iterable[HistoryEvent], saves: Sequence[CheckpointId]) -> list[_Stretch]:
    """Return the stretches in training order, grouped by attempt."""
    found: dict[int, list[_Stretch]] = {}
    restores: list[tuple[_Stretch, HistoryEvent]] = []
    for event in events:
        own = found.setdefault(event.attempt, []) if event.kind in (METRICS, "restored") else []
        if event.kind == METRICS:
            if not own:
                own.append(_Stretch(event.attempt))
            for name, step, value in event.numbers:
                own[-1].numbers.setdefault(name, {})[step] = value
        elif event.kind == "restored" and event.rank == 0 and event.step is not None:
            own.append(_Stretch(event.attempt, event.step))
            restores.append((own[-1], event))
    ordered = [one for number in sorted(found) for one in found[number]]
    for stretch, event in restores:
        if (owner := named_attempt(event)) is None and (known := checkpoint_of(event, saves)):
            owner = known.attempt
        own = next(i for i, other in enumerate(ordered) if other is stretch)
        for i, earlier in enumerate(ordered[:own]):
            if earlier.base <= stretch.base and owner in (None, earlier.attempt):
                stretch.source = i
    return ordered


def _curve(name: str, stretches: Sequence[_Stretch]) -> Curve:
    counted: list[Point] = []
    lost: list[tuple[Point, ...]] = []
    for stretch in stretches:
        numbers = sorted(stretch.numbers.get(name, {}).items())
        points = [Point(step, stretch.attempt, value) for step, value in numbers]
        counted += [point for point in points if stretch.base < point.step <= stretch.counts_upto]
        thrown = tuple(point for point in points if point.step > stretch.counts_upto)
        if thrown:
            lost.append(thrown)
    return Curve(name, tuple(sorted(counted, key=lambda point: point.step)), tuple(lost))
