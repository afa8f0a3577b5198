"""Retention of checkpoints: which ones stay, which is the best, and which continue each other; pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from msgspec import Struct

from holdfast.checkpoint.format.names import CheckpointId
from holdfast.errors import InvalidInput

_NO_VALUES: Mapping[CheckpointId, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Keep:
    """Retention policy: which checkpoints are kept, and which of them is the best.

    The value of a checkpoint is the one that `Checkpointer.record` received for its step. Without one, the
    newest value since the save before counts. A value may be recorded after the save, as long as the
    checkpoint exists. A checkpoint whose value is missing, NaN or infinite is never among the best ones.

    Only checkpoints that the newest one continues are compared: those that training went back behind are
    deleted, whatever their value.

    The newest checkpoint that is marked as healthy also stays.

    Args:
        last: number of newest checkpoints to keep; None keeps everything.
        every: also keep checkpoints whose step is a multiple of this.
        best: also keep this number of checkpoints with the best values of `metric`. Of equal ones the
            newer is better.
        metric: name of a recorded metric; `restore(best=True)` restores the checkpoint with its best value.
        mode: "min" if lower values are better, "max" if higher ones are.
    """

    last: int | None = 3
    every: int | None = None
    best: int | None = None
    metric: str | None = None
    mode: str = "min"

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 1:
            raise InvalidInput(
                f"keep must be at least 1: the newest checkpoint is never deleted. Got {self.last}."
            )
        if self.every is not None and self.every < 1:
            raise InvalidInput(f"Keep(every=) must be at least 1 step, got {self.every}.")
        if self.best is not None and self.best < 1:
            raise InvalidInput(f"Keep(best=...) must be at least 1, got {self.best}.")
        if self.best is not None and not self.metric:
            raise InvalidInput(
                'Keep(best=...) needs a metric, such as Keep(best=2, metric="loss", mode="min"). '
                "Its values are those given to Checkpointer.record()."
            )
        check_mode(self.mode)

    def kept(
        self, line: Sequence[CheckpointId], values: Mapping[CheckpointId, float] = _NO_VALUES
    ) -> set[CheckpointId]:
        """Return the checkpoints to keep.

        Args:
            line: complete checkpoints, newest first, none of them superseded.
            values: value of the metric, by checkpoint.
        """
        if self.last is None:
            return set(line)
        newest = set(line[: self.last])
        best = set(best_first(line, values, self.mode)[: self.best or 0])
        return newest | best | {found for found in line if self.every and found.step % self.every == 0}


def check_mode(mode: str) -> None:
    """Check how values of a metric are compared."""
    if mode not in ("min", "max"):
        raise InvalidInput(f'mode must be "min" or "max", got {mode!r}.')


def best_first(
    found: Iterable[CheckpointId], values: Mapping[CheckpointId, float], mode: str
) -> list[CheckpointId]:
    """Return the checkpoints that have a finite value, best first; of equal ones the newer first."""
    sign = 1 if mode == "min" else -1
    finite = [one for one in sorted(found, reverse=True) if math.isfinite(values.get(one, math.nan))]
    return sorted(finite, key=lambda one: sign * values[one])


class CheckpointLine(Struct, frozen=True):
    """Complete checkpoints of a home, newest first."""

    current: tuple[CheckpointId, ...]  # the newest, and what it continues
    superseded: tuple[CheckpointId, ...]  # left behind when a newer attempt began from an earlier step


def line_of(
    found: Iterable[CheckpointId], newest: CheckpointId, ancestors: Iterable[CheckpointId]
) -> CheckpointLine:
    """Return the line of the newest checkpoint, apart from what newer attempts left behind.

    Args:
        found: complete checkpoints, the newest among them.
        ancestors: of the newest: each checkpoint that an attempt was restored from.
    """
    last = {one.attempt: one.step for one in (*ancestors, newest)}
    ordered = sorted(found, reverse=True)
    return CheckpointLine(
        tuple(one for one in ordered if one.step <= last.get(one.attempt, -1)),
        tuple(one for one in ordered if one.step > last.get(one.attempt, -1)),
    )
