"""Half of the watch of finite values in a keeper: checks hashed tensors, and judges their norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from holdfast.checkpoint.format.sections import Mark, Section
from holdfast.checkpoint.home.judges import CompleteSave
from holdfast.checkpoint.keeper.watch import KeeperWatch, PersistedSave
from holdfast.errors import Corrupt
from holdfast.system.documents import Fields
from holdfast.watch.values.contents import ContentCheck, can_check
from holdfast.watch.values.judgement import (
    MAX_BEFORE,
    MAX_NAMES,
    NOT_CHECKED,
    Squares,
    TensorHealth,
    judge,
    not_finite,
)

_WHAT = "the section of finite values"
_MAX_NAME_CHARS = 1 << 14
_VERSION = 1


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
        data = {
            "num_bad": found.num_bad,
            "bad": [name[:_MAX_NAME_CHARS] for name in found.bad],
            "squares": _row(found.squares),
        }
        mark = Mark.AGAINST if found.num_bad else Mark.NONE
        return Section(_VERSION, data, mark, tuple(not_finite([found])))

    @override
    def committing(self, save: CompleteSave) -> Section | None:
        tensors = [_tensors(save.sections.get(rank)) for rank in range(save.world_size)]
        before = _before(save)
        found = judge(tensors, before)
        data = {"squares": _row(found.squares), "before": [_row(one) for one in before]}
        return Section(_VERSION, data, found.mark, found.reasons)


def _before(save: CompleteSave) -> tuple[Squares, ...]:
    """Return the sums of squares of the newest checkpoints that were not unhealthy, oldest first."""
    if save.base is None or save.base.version != _VERSION:
        return ()
    body = Fields(dict(save.base.data), _WHAT)
    before = [_squares(row) for row in body.array("before", max_items=MAX_BEFORE)]
    if save.is_base_healthy is not False:
        before.append(_squares(body.value("squares")))
    return tuple(before[-MAX_BEFORE:])


def _tensors(section: Section | None) -> TensorHealth | None:
    """Return the health of a rank's tensors; None if they were not checked."""
    if section is None or section.version != _VERSION or not section.data:
        return None
    body = Fields(dict(section.data), _WHAT)
    return TensorHealth(
        body.integer("num_bad"),
        body.texts("bad", max_items=MAX_NAMES, max_chars=_MAX_NAME_CHARS),
        _squares(body.value("squares")),
    )


def _row(squares: Squares) -> dict[str, float | None]:
    return {"parameters": squares.parameters, "moments": squares.moments}


def _squares(value: Any) -> Squares:
    body = Fields(value, _WHAT)
    found = (body.number(name, at_least=0.0) if name in body else None for name in ("parameters", "moments"))
    return Squares(*found)
