"""How many bytes of checkpoints every tier held over time, as far as events tell; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.report.events import MEMORY, TIERS, Event
from holdfast.report.saves import Save, owner_of

_Key = tuple[int, int]  # attempt, step


@dataclass(frozen=True, slots=True)
class Level:
    """What a tier held from a moment on."""

    unix_s: float
    tier: str
    num_bytes: int
    num_checkpoints: int


def levels_of(events: Iterable[Event], saves: Sequence[Save]) -> list[Level]:
    """Every change of what a tier held, by time.

    Deletions that leave no event, such as by `holdfast rm` or of a host's memory, are not seen.

    Args:
        events: of the whole run, by time.
        saves: of the same events.
    """
    sizes = {(save.attempt, save.step): save.num_bytes for save in saves}
    held: dict[str, dict[_Key, int]] = {}
    levels: list[Level] = []
    for event in events:
        there = held.setdefault(event.tier, {})
        before = len(there)
        _apply(event, there, sizes)
        if len(there) != before:
            levels.append(Level(event.unix_s, event.tier, sum(there.values()), len(there)))
    return levels


def _apply(event: Event, there: dict[_Key, int], sizes: dict[_Key, int]) -> None:
    if event.kind in ("committed", "drained") or (event.kind == "restored" and event.tier != MEMORY):
        # What was restored was there, although its commit may have been made by the attempt after it, which
        # tells of none.
        one = owner_of(event, sizes)
        if one is not None:
            there[one] = sizes[one]
    elif event.kind == "retained":
        one = owner_of(event, there)
        if one is not None:
            del there[one]


def tiers_in(levels: Iterable[Level]) -> list[str]:
    """The tiers that held something, nearest first."""
    found = {level.tier for level in levels}
    return [*(tier for tier in TIERS if tier in found), *sorted(found - set(TIERS))]
