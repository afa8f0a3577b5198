"""Half of the watch of finite values in a keeper: checks hashed tensors, and judges their norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from msgspec import Meta, Struct
from typing_extensions import override

from holdfast.checkpoint.format.sections import Mark, Section
from holdfast.checkpoint.home.judges import CompleteSave
from holdfast.checkpoint.keeper.watch import KeeperWatch, PersistedSave
from holdfast.errors import Corrupt
from holdfast.system.documents import read_as, to_plain
from holdfast.watch.values.contents import (
    MAX_BEFORE,
    NOT_CHECKED,
    ContentCheck,
    Squares,
    TensorHealth,
    can_check,
    judge,
    not_finite,
)

_WHAT = "the section of finite values"
_MAX_NAME_CHARS = 1 << 14
_VERSION = 1


class _Judged(Struct, frozen=True):
    """Section of a manifest: the sums of squares of its checkpoint, and of those before, oldest first."""

    squares: Squares
    before: Annotated[tuple[Squares, ...], Meta(max_length=MAX_BEFORE)]


class ValuesKeeper(KeeperWatch):
    """Check of the tensors in each data file, and of their norms in each checkpoint."""

    _check: ContentCheck | None = None

    @override
    def persisting(self, image: memoryview) -> Callable[[int, int], None] | None:
        self._check = None
        if not can_check():
            return None
        try:
            self._check = ContentCheck(image)
        except Corrupt:  # it is saved as it was staged, and a restore reports it
            return None
        return self._check.add

    @override
    def persisted(self, save: PersistedSave) -> Section | None:
        if self._check is None:
            return Section(_VERSION, {}, Mark.UNSURE, (NOT_CHECKED,))
        found, self._check = self._check.result(), None  # which holds the memory of the save
        data = {**to_plain(found), "bad": [name[:_MAX_NAME_CHARS] for name in found.bad]}
        mark = Mark.AGAINST if found.num_bad else Mark.NONE
        return Section(_VERSION, data, mark, tuple(not_finite([found])))

    @override
    def committing(self, save: CompleteSave) -> Section | None:
        tensors: list[TensorHealth | None] = []  # None if those of a rank were not checked
        for section in map(save.sections.get, range(save.world_size)):
            if section is None or section.version != _VERSION or not section.data:
                tensors.append(None)
            else:
                tensors.append(read_as(TensorHealth, dict(section.data), _WHAT))
        before: tuple[Squares, ...] = ()  # of the newest checkpoints that were not unhealthy, oldest first
        if save.base is not None and save.base.version == _VERSION:
            base = read_as(_Judged, dict(save.base.data), _WHAT)
            own = () if save.is_base_healthy is False else (base.squares,)
            before = (*base.before, *own)[-MAX_BEFORE:]
        found = judge(tensors, before)
        data = {"squares": to_plain(found.squares), "before": list(map(to_plain, before))}
        return Section(_VERSION, data, found.mark, found.reasons)
