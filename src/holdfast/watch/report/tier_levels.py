"""Bytes of checkpoints in each tier over time, as far as events record them; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.checkpoint.format.names import CheckpointId
from holdfast.watch.report.events import MEMORY, TIERS, HistoryEvent
from holdfast.watch.report.saves import SaveRecord, checkpoint_of


@dataclass(frozen=True, slots=True)
class TierLevel:
    """Contents of a tier from one moment on."""

    unix_s: float
    tier: str
    num_bytes: int
    num_checkpoints: int


def tier_levels(events: Iterable[HistoryEvent], saves: Sequence[SaveRecord]) -> list[TierLevel]:
    """Return every change of the contents of a tier, by time.

    Deletions without an event are missing, such as by `holdfast rm` or of a host's memory.
    """
    sizes = {save.checkpoint_id: save.num_bytes for save in saves}
    contents: dict[str, dict[CheckpointId, int]] = {}
    levels: list[TierLevel] = []
    for event in events:
        tier = contents.setdefault(event.tier, {})
        before = len(tier)
        _apply(event, tier, sizes)
        if len(tier) != before:
            levels.append(TierLevel(event.unix_s, event.tier, sum(tier.values()), len(tier)))
    return levels


def _apply(event: HistoryEvent, tier: dict[CheckpointId, int], sizes: dict[CheckpointId, int]) -> None:
    if event.kind in ("committed", "drained") or (event.kind == "restored" and event.tier != MEMORY):
        # A restored checkpoint was complete, even if the commit was made by a later attempt without an event.
        one = checkpoint_of(event, sizes)
        if one is not None:
            tier[one] = sizes[one]
    elif event.kind == "retained":
        one = checkpoint_of(event, tier)
        if one is not None:
            del tier[one]


def tiers_in(levels: Iterable[TierLevel]) -> list[str]:
    """Return the tiers that had contents, nearest first."""
    found = {level.tier for level in levels}
    return [*(tier for tier in TIERS if tier in found), *sorted(found - set(TIERS))]
