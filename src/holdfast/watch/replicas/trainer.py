"""Watch of replicas: the tensors that several ranks hold, compared at each save some of them."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from holdfast.checkpoint.copies import Copies, SharedTensor
from holdfast.checkpoint.format.sections import Section
from holdfast.checkpoint.watch import CopiedSave, Watch, WatchedRun
from holdfast.errors import InvalidInput
from holdfast.system.units import plural

MAX_TURNS = 64  # saves within which every tensor is compared, at most, unless the user chooses a number
FREE_BYTES = 64 << 20
"""Bytes of a rank that are compared at every save in any case: some 20 ms of processor time."""
_TURNS_PER_COPY = 8
"""A turn has an eighth of the bytes that a rank writes: it writes one of the copies' share."""


def turns_of(tensors: Sequence[SharedTensor], *, within: int | None) -> Copies:
    """Distribute the tensors that other ranks hold too over turns of about the same bytes.

    Every tensor is compared `within` so many saves; None bounds the cost instead: a turn has an eighth of the
    bytes that the rank writes, or 64 MiB, and there are at most 64 turns.

    Ranks: not collective; ranks that hold the same tensors compute the same turns for them.
    """
    by_object: dict[int, list[SharedTensor]] = {}
    for tensor in tensors:
        by_object.setdefault(id(tensor.holders), []).append(tensor)
    by_holders: dict[tuple[tuple[int, ...], ...], list[SharedTensor]] = {}
    for members in by_object.values():  # few: hashing a thousand ranks for each tensor would take long
        by_holders.setdefault(members[0].holders, []).extend(members)
    found: list[tuple[tuple[str, ...], ...]] = []
    for holders, members in by_holders.items():
        num_bytes = sum(one.num_bytes for one in members)
        most = min(-(-num_bytes // FREE_BYTES), _TURNS_PER_COPY * len(holders), MAX_TURNS)
        found.append(_turns(members, max(1, most) if within is None else within))
    return Copies(tuple(found))


def _turns(members: Sequence[SharedTensor], num_turns: int) -> tuple[tuple[str, ...], ...]:
    """Distribute tensors, the largest first, each to the turn with the fewest bytes so far."""
    loads = [(0, turn) for turn in range(num_turns)]
    turns: list[list[str]] = [[] for _ in range(num_turns)]
    for tensor in sorted(members, key=lambda tensor: (-tensor.num_bytes, tensor.name)):
        load, turn = loads[0]
        turns[turn].append(tensor.name)
        heapq.heapreplace(loads, (load + tensor.num_bytes, turn))
    return tuple(map(tuple, turns))


@dataclass
class Replicas(Watch):
    """Comparison of the tensors that several ranks hold, at each save some of them.

    Args:
        within: number of saves within which every tensor is compared. "auto" bounds the cost instead: at each
            save 64 MiB, or an eighth of the bytes that the rank writes, and every tensor within 64 saves.
            "off" to compare nothing.

    Raises:
        InvalidInput: a value cannot be used.
    """

    name: ClassVar[str] = "replicas"
    keeper: ClassVar[str | None] = "holdfast.watch.replicas.keeper:ReplicasKeeper"
    events: ClassVar[Mapping[str, str]] = {
        "replica-check": "the share of replicated tensors that each save compares",
        "replicas-differ": "in a checkpoint; with the member `difference`",
    }

    within: int | str = "auto"

    def __post_init__(self) -> None:
        is_count = isinstance(self.within, int) and not isinstance(self.within, bool) and self.within >= 1
        if self.within not in ("auto", "off") and not is_count:
            raise InvalidInput(
                f"Replicas(within=) must be 'auto', 'off' or a whole number from 1, got {self.within!r:.100}."
            )
        self._noted = ""  # what the history has about the comparison

    @override
    def applies(self, run: WatchedRun) -> bool:
        return self.within != "off" and run.world_size > 1

    @override
    def begin(self, run: WatchedRun) -> None:
        self._run = run
        self._num_tensors = self._num_saves = 0

    @override
    def planned(self, tensors: Sequence[SharedTensor]) -> Copies | None:
        within = self.within if isinstance(self.within, int) else None
        turns = turns_of(tensors, within=within)
        self._num_tensors, self._num_saves = len(tensors), turns.num_saves
        return turns if tensors else None

    @override
    def saving(self, save: CopiedSave) -> Section | None:
        tensors = plural(self._num_tensors, "replicated tensor")
        text = f"{tensors}, each compared once in {plural(self._num_saves, 'save')}"
        if not save.has_room:
            text = "only the tensors that this rank writes are hashed: memory= has no room for others"
        if self._num_tensors and text != self._noted:  # at the first save, and when that changes
            self._noted = text
            self._run.note("replica-check", step=None, detail=text)
        rows = [[one.number, one.region, int(one.is_trained)] for one in save.copies]
        return Section(1, {"rows": rows}) if rows else None
