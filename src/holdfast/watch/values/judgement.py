"""Judgement of the values of a checkpoint, from all ranks and the checkpoints before; pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated

from holdfast.checkpoint.format.sections import Mark
from holdfast.system.documents import Bounds, Count

MAX_NAMES = 8  # tensors that are named in a part; the others are only counted
MAX_BEFORE = 8
"""Checkpoints before whose norms are kept, so that the next attempt has something to compare with."""
_MIN_BEFORE = 3  # checkpoints that a norm is compared with, at least
_MAX_GROWTH = 10.0
"""A norm of parameters this many times as large, or as small, as before is not within reason."""
_MAX_MOMENT_GROWTH = 100.0  # the same for norms of an optimizer's state, which follow the gradients
_Square = Annotated[float, Bounds(at_most=math.inf)] | None


@dataclass(frozen=True, slots=True)
class Squares:
    """Sums of squares of floating-point tensors; None where there are none, or they overflow."""

    parameters: _Square = None
    moments: _Square = None  # of optimizers


@dataclass(frozen=True, slots=True)
class TensorHealth:
    """Health of the tensors in one data file."""

    num_bad: Count = 0  # tensors with a NaN, or with an infinity that is not part of a mask
    bad: Annotated[tuple[str, ...], Bounds(max_len=MAX_NAMES)] = ()  # names of the first of them
    squares: Squares = Squares()  # sums of squares of this rank's shards


@dataclass(frozen=True, slots=True)
class ValueJudgement:
    """Judgement of the tensors of all ranks."""

    mark: Mark  # FOR only if the norms could be compared with those before, and are within reason
    reasons: tuple[str, ...]  # of the mark
    squares: Squares  # of all ranks together


def judge(tensors: Iterable[TensorHealth | None], before: Sequence[Squares] = ()) -> ValueJudgement:
    """Return the judgement of a checkpoint's values.

    Args:
        tensors: of each rank; None where they were not checked.
        before: sums of squares of the checkpoints before that were not unhealthy, oldest first.
    """
    found = list(tensors)
    checked = [one for one in found if one is not None]
    squares = Squares(
        _total(one.squares.parameters for one in checked), _total(one.squares.moments for one in checked)
    )
    against = (*not_finite(checked), *_out_of_reason(squares, before))
    if against:
        return ValueJudgement(Mark.AGAINST, against, squares)
    if len(checked) < len(found):
        return ValueJudgement(Mark.UNSURE, (NOT_CHECKED,), squares)
    known = [one for one in before if one.parameters]
    can_compare = squares.parameters is not None and len(known) >= _MIN_BEFORE
    mark = Mark.FOR if can_compare else Mark.NONE
    return ValueJudgement(mark, ("all tensors are finite",), squares)


NOT_CHECKED = "the tensors were not checked: numpy is not installed"


def _total(values: Iterable[float | None]) -> float | None:
    """Return the sum of the ranks' sums; None if none has one, or it overflows."""
    known = [value for value in values if value is not None]
    total = math.fsum(known) if known else math.inf
    return total if math.isfinite(total) else None


def not_finite(checked: Iterable[TensorHealth]) -> list[str]:
    """Return a reason that names the first tensors that are not finite, if there are any."""
    checked = list(checked)
    names = [name for one in checked for name in one.bad][:MAX_NAMES]
    num_bad = sum(one.num_bad for one in checked)
    if not num_bad:
        return []
    more = f" and {num_bad - len(names)} more" if num_bad > len(names) else ""
    return [f"NaN or infinity in {', '.join(name[:100] for name in names)}{more}"]


def _out_of_reason(squares: Squares, before: Sequence[Squares]) -> list[str]:
    """Return the norms that differ too much from those before."""
    if len(before) < _MIN_BEFORE:
        return []
    found: list[str] = []
    for name, now, earlier, limit in (
        ("parameters", squares.parameters, [one.parameters for one in before], _MAX_GROWTH),
        ("optimizer state", squares.moments, [one.moments for one in before], _MAX_MOMENT_GROWTH),
    ):
        known = [value for value in earlier if value is not None]
        usual = math.sqrt(median(known)) if len(known) >= _MIN_BEFORE else 0.0
        if now is None or usual == 0.0:
            continue
        ratio = math.sqrt(now) / usual
        if ratio > limit or (name == "parameters" and ratio < 1 / limit):
            found.append(f"the norm of the {name} is {math.sqrt(now):.4g}, usually {usual:.4g}")
    return found
