"""Groups of ranks at the same place, and the ranks that the others wait for; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.watch.hang.capture import ProcessStacks
from holdfast.watch.hang.evidence import RankEvidence
from holdfast.watch.hang.places import Kind, Place, find_place
from holdfast.watch.hang.stacks import main_thread

_STOPPED = ("stopped", "gone", "waiting for a device")


@dataclass(frozen=True, slots=True)
class PlaceGroup:
    """Ranks that are at the same place.

    Attributes:
        ranks: their numbers, ascending.
        place: their place, as text.
        kind: its kind; WORKS for processes that are stopped or gone.
        step: their newest completed step.
        is_odd: the others wait for them.
    """

    ranks: tuple[int, ...]
    place: str
    kind: Kind
    step: int
    is_odd: bool = False


def place_of(evidence: RankEvidence) -> Place | None:
    """Return the place of the thread that trains; None without stacks."""
    return _place(evidence.process, evidence.thread)


def _place(process: ProcessStacks, thread: int) -> Place | None:
    found = main_thread(process.threads, thread)
    return None if found is None else find_place(found)


def group_ranks(evidence: Iterable[RankEvidence]) -> list[PlaceGroup]:
    """Return the groups of ranks at the same place, the odd ones first."""
    groups: dict[tuple[str, Kind, int], list[int]] = {}
    for one in sorted(evidence, key=lambda one: one.rank):
        place = place_of(one)
        is_stopped = one.process.state.startswith(_STOPPED) or place is None
        kind = Kind.WORKS if is_stopped or place is None else place.kind
        groups.setdefault((_describe(one, place), kind, one.step), []).append(one.rank)
    found = [PlaceGroup(tuple(ranks), text, kind, step) for (text, kind, step), ranks in groups.items()]
    odd = _odd(found)
    marked = [PlaceGroup(one.ranks, one.place, one.kind, one.step, one in odd) for one in found]
    return sorted(marked, key=lambda one: (not one.is_odd, one.ranks))


def _describe(one: RankEvidence, place: Place | None) -> str:
    text = one.process.state if place is None else f"in {place.describe()}"
    if one.process.state.startswith(_STOPPED) and place is not None:
        text = f"{one.process.state} {text}"
    if one.phase:
        text = f"{text}, in phase {one.phase!r}"
    for worker in one.workers:
        at = _place(worker, 0)
        if at is not None and at.user is not None and _is_in_loader(place):
            return f"{text}; its worker is in {at.describe()}"
    return text


def _is_in_loader(place: Place | None) -> bool:
    return place is not None and place.operation.startswith("DataLoader")


def _odd(groups: Sequence[PlaceGroup]) -> list[PlaceGroup]:
    """Return the groups that the others wait for.

    They are those that do not wait for other ranks. If all wait, some ranks have skipped what the others are
    in: those that have come further, else the fewest.
    """
    waiting = [one for one in groups if one.kind in (Kind.WAITS, Kind.SYNCS)]
    others = [one for one in groups if one not in waiting]
    if others or len(waiting) < 2:
        return others
    sizes = {len(one.ranks) for one in waiting}
    if len(sizes) > 1:
        return [one for one in waiting if len(one.ranks) < max(sizes)]
    furthest = max(map(_progress, waiting))
    ahead = [one for one in waiting if _progress(one) == furthest]
    return ahead if len(ahead) < len(waiting) else []


def _progress(group: PlaceGroup) -> tuple[int, bool]:
    return group.step, group.kind is Kind.SYNCS
