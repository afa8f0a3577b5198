"""What training told of itself, step by step: the line that counts, and what was trained beside it; pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from holdfast.report.events import METRICS, Event
from holdfast.report.saves import owner_of

_NUMBER = re.compile(r"[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class Point:
    """One number of one step."""

    step: int
    attempt: int
    value: float


@dataclass(frozen=True, slots=True)
class Curve:
    """All that was told under one name."""

    name: str
    counted: tuple[Point, ...]  # by step, each at most once: what led to where training stands
    lost: tuple[tuple[Point, ...], ...]  # stretches that an interruption threw away, each of one attempt


@dataclass(slots=True)
class _Stretch:
    """What one attempt trained from where it was restored."""

    attempt: int
    base: int = -1  # the step it was restored from; -1: it began from nothing
    source: int | None = None  # index of the stretch that the restored step came from
    numbers: dict[str, dict[int, float]] = field(default_factory=dict)
    counts_upto: float = -math.inf


def curves_of(events: Iterable[Event], saves: Iterable[tuple[int, int]] = ()) -> list[Curve]:
    """The curves that events tell, in the order in which their names were first told.

    A step counts as told by the attempt that led to where training stands now: from the newest attempt back
    to what it was restored from, and from there on in the same way.

    Args:
        events: of the whole run, by time.
        saves: attempt and step of all saves, for restores that do not say whose checkpoint they took.
    """
    stretches = _stretches(events, sorted(saves))
    _count(stretches)
    names = dict.fromkeys(name for one in stretches for name in one.numbers)
    return [_curve(name, stretches) for name in names]


def _stretches(events: Iterable[Event], saves: Sequence[tuple[int, int]]) -> list[_Stretch]:
    """In the order in which they were trained, those of an attempt beside each other."""
    found: dict[int, list[_Stretch]] = {}
    restores: list[tuple[_Stretch, Event]] = []
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
        stretch.source = _source(stretch, event, ordered, saves)
    return ordered


def _source(
    stretch: _Stretch, event: Event, ordered: Sequence[_Stretch], saves: Sequence[tuple[int, int]]
) -> int | None:
    """Which stretch trained the step that one was restored from."""
    owner = _owner(event, saves)
    before = ordered[: next(i for i, one in enumerate(ordered) if one is stretch)]
    fits = [i for i, one in enumerate(before) if one.base <= stretch.base and owner in (None, one.attempt)]
    return fits[-1] if fits else None


def _owner(event: Event, saves: Sequence[tuple[int, int]]) -> int | None:
    """The attempt whose checkpoint was restored, if it was told or can be told from the saves."""
    first = event.detail.partition(";")[0].split()
    if len(first) == 2 and first[0] == "attempt" and _NUMBER.fullmatch(first[1]):
        return int(first[1])
    known = owner_of(event, saves)
    return known[0] if known else None


def _count(stretches: Sequence[_Stretch]) -> None:
    """Tell each stretch up to which step it counts."""
    upto: float = math.inf
    at = len(stretches) - 1 if stretches else None
    while at is not None:
        one = stretches[at]
        one.counts_upto = upto
        upto, at = min(upto, one.base), one.source  # a source always lies before


def _curve(name: str, stretches: Sequence[_Stretch]) -> Curve:
    counted: list[Point] = []
    lost: list[tuple[Point, ...]] = []
    for one in stretches:
        points = [
            Point(step, one.attempt, value) for step, value in sorted(one.numbers.get(name, {}).items())
        ]
        counted += [point for point in points if one.base < point.step <= one.counts_upto]
        thrown = tuple(point for point in points if point.step > one.counts_upto)
        if thrown:
            lost.append(thrown)
    return Curve(name, tuple(sorted(counted, key=lambda point: point.step)), tuple(lost))
