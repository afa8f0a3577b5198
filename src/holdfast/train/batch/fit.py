"""What a search for a batch has found: sizes, bytes and times, kept with the run so that it searches once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, final

from holdfast.errors import InvalidInput
from holdfast.quantity import say_bytes, say_seconds

_WORTH_WHILE = 0.97


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """What one size took, on the rank where it took most.

    Attributes:
        size: samples of a rank in one step.
        peak_bytes: memory at the step's peak; None if it was too much to be measured.
        fits: True if every rank had room for it.
        step_s: seconds of a step; None if it was not timed.
    """

    size: int
    peak_bytes: int | None
    fits: bool
    step_s: float | None = None

    @property
    def throughput(self) -> float:
        """Samples of a rank per second; 0 if it was not timed."""
        return self.size / self.step_s if self.step_s else 0.0


@final
class BatchFit:
    """The found batch size. Put it into the state of a Checkpointer: a resumed run then does not search.

    Empty when made; `fit_batch` fills it, or a restore does. False while empty.

    Attributes:
        size: samples of a rank in one step: the smallest whose throughput is within 3 % of the best.
        largest: the most samples of a rank that fit.
        limit_bytes: memory that one rank had for it, the least of all ranks.
        world_size: how many ranks agreed on it.
        probes: what each size took, by size.
        note: how memory was foretold, or why it was not.
    """

    def __init__(self) -> None:
        self.size = 0
        self.largest = 0
        self.limit_bytes = 0
        self.world_size = 1
        self.probes: tuple[Probe, ...] = ()
        self.note = ""

    def __bool__(self) -> bool:
        return self.size > 0

    def state_dict(self) -> dict[str, Any]:
        """All that was found, as plain values."""
        probes = [[one.size, one.peak_bytes, one.fits, one.step_s] for one in self.probes]
        return {
            "size": self.size,
            "largest": self.largest,
            "limit_bytes": self.limit_bytes,
            "world_size": self.world_size,
            "probes": probes,
            "note": self.note,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what an earlier start has found."""
        self.size, self.largest = state["size"], state["largest"]
        self.limit_bytes, self.world_size = state["limit_bytes"], state["world_size"]
        self.probes = tuple(Probe(*one) for one in state["probes"])
        self.note = state["note"]

    def __str__(self) -> str:
        """A table for people."""
        if not self:
            return "no batch has been searched for yet"
        lines = [f"{'batch':>8s} {'peak':>10s} {'step':>10s} {'samples/s':>10s}"]
        for one in self.probes:
            peak = say_bytes(one.peak_bytes) if one.peak_bytes is not None else "too much"
            step = say_seconds(one.step_s) if one.step_s else "-"
            rate = f"{one.throughput:.4g}" if one.step_s else "-"
            mark = "  <- taken" if one.size == self.size else "" if one.fits else "  does not fit"
            lines.append(f"{one.size:8d} {peak:>10s} {step:>10s} {rate:>10s}{mark}")
        lines.append(
            f"largest that fits into {say_bytes(self.limit_bytes)}: {self.largest}; taken: {self.size}, the "
            f"smallest within 3 % of the best throughput ({self.world_size} ranks, {self.note})"
        )
        return "\n".join(lines)


def choose_batch(probes: Sequence[Probe]) -> int:
    """The smallest size whose throughput is within 3 % of the best.

    Steps of the same work differ by about that much from one to the next, so no smaller gain is believed.

    Raises:
        InvalidInput: no size was timed.
    """
    timed: Sequence[Probe] = sorted(
        (one for one in probes if one.fits and one.step_s), key=lambda one: one.size
    )
    if not timed:
        raise InvalidInput(f"None of {len(tuple(probes))} sizes fits and was timed, so none can be chosen.")
    best = max(one.throughput for one in timed)
    return next(one.size for one in timed if one.throughput >= _WORTH_WHILE * best)
