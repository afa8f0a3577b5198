"""Watch of replicas: the tensors that several ranks hold, compared at each save some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from holdfast.checkpoint.copies import Copies, SharedTensor
from holdfast.checkpoint.format.sections import Section
from holdfast.checkpoint.watch import CopiedSave, Watch, WatchedRun
from holdfast.errors import InvalidInput
from holdfast.system.units import plural
from holdfast.watch.replicas.turns import turns_of


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
        self._note(save)
        rows = [[one.number, one.region, int(one.is_trained)] for one in save.copies]
        return Section(1, {"rows": rows}) if rows else None

    def _note(self, save: CopiedSave) -> None:
        """Record how the tensors are compared, at the first save and when that changes."""
        if not self._num_tensors:
            return
        tensors = plural(self._num_tensors, "replicated tensor")
        text = f"{tensors}, each compared once in {plural(self._num_saves, 'save')}"
        if not save.has_room:
            text = "only the tensors that this rank writes are hashed: memory= has no room for others"
        if text != self._noted:
            self._noted = text
            self._run.note("replica-check", step=None, detail=text)
