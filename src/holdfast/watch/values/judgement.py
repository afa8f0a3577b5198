"""Judgement of a checkpoint's health, from all ranks and the checkpoints before; pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

from holdfast.checkpoint.format.health import MAX_NAMES, Health, Squares, TensorHealth, Trend
from holdfast.system.units import plural
from holdfast.watch.values.replicas import Comparison

_MIN_BEFORE = 3
"""Checkpoints that a norm is compared with, at least."""
_MAX_GROWTH = 10.0
"""A norm of parameters this many times as large, or as small, as before is not within reason."""
_MAX_MOMENT_GROWTH = 100.0
"""The same for norms of an optimizer's state, which follow the gradients."""

_NOT_COMPARED = Comparison()


def judge(
    tensors: Iterable[TensorHealth | None],
    trend: Trend | None,
    before: Sequence[Squares] = (),
    replicas: Comparison = _NOT_COMPARED,
) -> Health:
    """Return the health of a checkpoint.

    It is healthy if all tensors are finite, nothing else counts against it, and either the metrics or the
    norms could be judged. It is unknown if neither could be, or some tensors were not checked.

    Args:
        tensors: of each rank; None where they were not checked.
        trend: of the recorded metrics.
        before: sums of squares of the checkpoints before that were not unhealthy, oldest first.
        replicas: comparison of the tensors that several ranks hold.
    """
    found = list(tensors)
    checked = [one for one in found if one is not None]
    squares = Squares(
        _total(one.squares.parameters for one in checked), _total(one.squares.moments for one in checked)
    )
    against = [*_not_finite(checked), *_out_of_reason(squares, before)]
    against += [f"at step {one.step} {one.text}" for one in replicas.differences]
    if trend is not None and trend.is_spiking:
        against.append(trend.detail)
    if against:
        return Health(False, tuple(against), squares, tuple(before))
    if len(checked) < len(found):
        return Health(None, ("the tensors were not checked: numpy is not installed",), squares, tuple(before))
    is_judged = (trend is not None and trend.is_spiking is False) or _can_compare(squares, before)
    trend_detail = "no loss was recorded" if trend is None else trend.detail
    reasons = ["all tensors are finite", trend_detail]
    if replicas.num_equal:
        reasons.append(f"{plural(replicas.num_equal, 'replicated tensor')} compared and equal on all ranks")
    return Health(True if is_judged else None, tuple(reasons), squares, tuple(before))


def _total(values: Iterable[float | None]) -> float | None:
    """Return the sum of the ranks' sums; None if none has one, or it overflows."""
    known = [value for value in values if value is not None]
    total = math.fsum(known) if known else math.inf
    return total if math.isfinite(total) else None


def _not_finite(checked: Iterable[TensorHealth]) -> list[str]:
    names = [name for one in checked for name in one.bad][:MAX_NAMES]
    num_bad = sum(one.num_bad for one in checked)
    if not num_bad:
        return []
    more = f" and {num_bad - len(names)} more" if num_bad > len(names) else ""
    return [f"NaN or infinity in {', '.join(name[:100] for name in names)}{more}"]


def _norms(squares: Squares) -> tuple[tuple[str, float | None, float], ...]:
    return (
        ("parameters", squares.parameters, _MAX_GROWTH),
        ("optimizer state", squares.moments, _MAX_MOMENT_GROWTH),
    )


def _out_of_reason(squares: Squares, before: Sequence[Squares]) -> list[str]:
    """Return the norms that differ too much from those before."""
    if len(before) < _MIN_BEFORE:
        return []
    found: list[str] = []
    for (name, now, limit), earlier in zip(
        _norms(squares), zip(*map(_norms, before), strict=True), strict=True
    ):
        known = [value for _, value, _ in earlier if value is not None]
        usual = math.sqrt(median(known)) if len(known) >= _MIN_BEFORE else 0.0
        if now is None or usual == 0.0:
            continue
        ratio = math.sqrt(now) / usual
        if ratio > limit or (name == "parameters" and ratio < 1 / limit):
            found.append(f"the norm of the {name} is {math.sqrt(now):.4g}, usually {usual:.4g}")
    return found


def _can_compare(squares: Squares, before: Sequence[Squares]) -> bool:
    known = [one for one in before if one.parameters]
    return squares.parameters is not None and len(known) >= _MIN_BEFORE
