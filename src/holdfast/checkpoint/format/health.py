"""Health in documents: facts of a rank's tensors in its part, and the judgement in the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.system.documents import Fields

MAX_NAMES = 8
"""Tensors that are named in a part; the others are only counted."""
MAX_REASONS = 32
MAX_REASON_CHARS = 1000
MAX_BEFORE = 8
"""Checkpoints before whose norms are kept, so that the next attempt has something to compare with."""
_MAX_NAME_CHARS = 1 << 14


@dataclass(frozen=True, slots=True)
class Squares:
    """Sums of squares of floating-point tensors; None where there are none, or they overflow."""

    parameters: float | None = None
    moments: float | None = None  # of optimizers


@dataclass(frozen=True, slots=True)
class TensorHealth:
    """Health of the tensors in one data file.

    Attributes:
        num_bad: tensors with a NaN, or with an infinity that is not part of a mask.
        bad: names of the first of them.
        squares: sums of squares of this rank's shards.
    """

    num_bad: int = 0
    bad: tuple[str, ...] = ()
    squares: Squares = Squares()


@dataclass(frozen=True, slots=True)
class Trend:
    """Judgement of the metrics that were recorded up to a save.

    Attributes:
        is_spiking: None if there are too few values.
        detail: the values that are too high, or why that is not known.
    """

    is_spiking: bool | None
    detail: str


@dataclass(frozen=True, slots=True)
class Health:
    """Health of a checkpoint.

    Attributes:
        healthy: None if it is not known.
        reasons: findings; for a checkpoint that is not healthy, those that count against it.
        squares: of all ranks together.
        before: of the checkpoints before that were not unhealthy, oldest first.
    """

    healthy: bool | None
    reasons: tuple[str, ...] = ()
    squares: Squares = Squares()
    before: tuple[Squares, ...] = ()

    @property
    def word(self) -> str:
        """The judgement as a word: "healthy", "unhealthy" or "unknown"."""
        return "unknown" if self.healthy is None else "healthy" if self.healthy else "unhealthy"


UNKNOWN = Health(None, ("saved without a check of its health",))
"""Health of a checkpoint whose documents do not mention it."""


def tensor_members(found: TensorHealth) -> dict[str, Any]:
    """Return the health of tensors as JSON."""
    return {"num_bad": found.num_bad, "bad": found.bad, "squares": _squares_members(found.squares)}


def read_tensors(body: Fields) -> TensorHealth | None:
    """Return the health of a part's tensors; None if it was not checked.

    Raises:
        Corrupt: it is something else.
    """
    if "health" not in body:
        return None
    health = body.fields("health")
    return TensorHealth(
        health.integer("num_bad"),
        health.texts("bad", max_items=MAX_NAMES, max_chars=_MAX_NAME_CHARS),
        _read_squares(health.fields("squares")),
    )


def trend_members(trend: Trend) -> dict[str, Any]:
    """Return the judgement of metrics as JSON."""
    return {"is_spiking": trend.is_spiking, "detail": trend.detail[:MAX_REASON_CHARS]}


def read_trend(body: Fields) -> Trend | None:
    """Return the judgement of metrics in a part; None without one.

    Raises:
        Corrupt: it is something else.
    """
    if "trend" not in body:
        return None
    trend = body.fields("trend")
    is_spiking = trend.flag("is_spiking") if "is_spiking" in trend else None
    return Trend(is_spiking, trend.text("detail", max_chars=MAX_REASON_CHARS))


def health_members(health: Health) -> dict[str, Any]:
    """Return the health of a checkpoint as JSON."""
    return {
        "healthy": health.healthy,
        "reasons": [reason[:MAX_REASON_CHARS] for reason in health.reasons[:MAX_REASONS]],
        "squares": _squares_members(health.squares),
        "before": [_squares_members(one) for one in health.before[-MAX_BEFORE:]],
    }


def read_health(body: Fields) -> Health:
    """Return the health in a manifest; unknown where it is not mentioned.

    Raises:
        Corrupt: it is something else.
    """
    if "health" not in body:
        return UNKNOWN
    health = body.fields("health")
    return Health(
        health.flag("healthy") if "healthy" in health else None,
        health.texts("reasons", max_items=MAX_REASONS, max_chars=MAX_REASON_CHARS),
        _read_squares(health.fields("squares")),
        tuple(
            _read_squares(Fields(row, health.what)) for row in health.array("before", max_items=MAX_BEFORE)
        ),
    )


def _squares_members(squares: Squares) -> Mapping[str, float | None]:
    return {"parameters": squares.parameters, "moments": squares.moments}


def _read_squares(body: Fields) -> Squares:
    found = (body.number(name, at_least=0.0) if name in body else None for name in ("parameters", "moments"))
    return Squares(*found)
