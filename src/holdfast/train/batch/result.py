"""Result of a batch-size search, and what its size means for learning rates and accumulation; pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, final

from msgspec import Struct
from msgspec.structs import astuple

from holdfast.errors import InvalidInput
from holdfast.system.units import format_bytes, format_duration, plural

_FULL_THROUGHPUT = 0.97  # of the best: steps of the same work differ by about 3 %


class Probe(Struct, frozen=True):
    """Measurements of one batch size, from the rank that needed most.

    Attributes:
        size: samples of a rank in one step.
        peak_bytes: memory at the step's peak. None if it was too much to measure.
        fits: True if the size fits on every rank.
        step_s: seconds of a step. None if it was not timed.
    """

    size: int
    peak_bytes: int | None
    fits: bool
    step_s: float | None = None

    @property
    def throughput(self) -> float:
        """Samples of a rank per second, or 0 if the size was not timed."""
        return self.size / self.step_s if self.step_s else 0.0


@final
class BatchFit:
    """Batch size found by `fit_batch`. Put it into a Checkpointer's state, and a resumed run does not search.

    A new instance is empty, and false. `fit_batch` or a restore fills it in.

    Attributes:
        size: samples of a rank in one step: the smallest size within 3 % of the best throughput.
        largest: the most samples of a rank that fit.
        limit_bytes: memory limit of one rank, the smallest of all ranks.
        world_size: number of ranks that agreed on it.
        probes: measurements, by size.
    """

    def __init__(self) -> None:
        self.size = 0
        self.largest = 0
        self.limit_bytes = 0
        self.world_size = 1
        self.probes: tuple[Probe, ...] = ()

    def __bool__(self) -> bool:
        return self.size > 0

    def state_dict(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return {**vars(self), "probes": [list(astuple(one)) for one in self.probes]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of an earlier search."""
        vars(self).update({name: state[name] for name in vars(self)})
        self.probes = tuple(Probe(*one) for one in state["probes"])

    def __str__(self) -> str:
        """Return the measurements as a table."""
        if not self:
            return "no batch size found yet"
        lines = [f"{'batch':>8s} {'peak':>10s} {'step':>10s} {'samples/s':>10s}"]
        for probe in self.probes:
            peak = format_bytes(probe.peak_bytes) if probe.peak_bytes is not None else "-"
            step = format_duration(probe.step_s) if probe.step_s else "-"
            rate = f"{probe.throughput:.4g}" if probe.step_s else "-"
            mark = "  <- chosen" if probe.size == self.size else "" if probe.fits else "  does not fit"
            lines.append(f"{probe.size:8d} {peak:>10s} {step:>10s} {rate:>10s}{mark}")
        lines.append(
            f"largest that fits in {format_bytes(self.limit_bytes)}: {self.largest}; chosen: {self.size}, "
            f"the smallest within 3 % of the best throughput ({plural(self.world_size, 'rank')})"
        )
        return "\n".join(lines)


def choose_size(probes: Sequence[Probe]) -> int:
    """Return the smallest size whose throughput is within 3 % of the best."""
    timed = sorted((probe for probe in probes if probe.fits and probe.step_s), key=attrgetter("size"))
    if not timed:
        raise InvalidInput(
            f"Cannot choose a batch size: none of {len(tuple(probes))} sizes fits and was timed."
        )
    best = max(probe.throughput for probe in timed)
    return next(probe.size for probe in timed if probe.throughput >= _FULL_THROUGHPUT * best)


def scaled_rates(rate: float, tuned_batch_size: int, batch_size: int, *, optimizer: str) -> list[str]:
    """Return a line for each rule with the learning rate for another batch size, in the optimizer's order.

    A rule gives a starting point only. In our short run of AdamW the linear rule did better.

    Source: Goyal et al. 2017 (linear, with warm-up, for SGD); Krizhevsky 2014 and Malladi et al. 2022 (square
        root, the latter for Adam and RMSprop).
    """
    factor = batch_size / tuned_batch_size
    root = math.sqrt(factor)
    lines = [
        f"{rate * factor:.3g} by the linear rule, for SGD (Goyal et al. 2017, arXiv 1706.02677; warm up over "
        "the first epochs)",
        f"{rate * root:.3g} by the square root rule, for Adam, AdamW, RMSprop (Malladi et al. 2022, arXiv "
        f"2205.10287; Krizhevsky 2014, arXiv 1404.5997; the former also scales 1-beta by {factor:.3g} and "
        f"eps by {1 / root:.3g})",
    ]
    is_adaptive = any(word in optimizer.lower() for word in ("adam", "rms", "lamb", "adafactor", "lion"))
    return lines[::-1] if is_adaptive else lines


def plan_accumulation(global_batch_size: int, max_micro_batch: int, world_size: int) -> tuple[int, int]:
    """Return the number of micro-batches of each rank in an optimizer step, and the size of the largest."""
    share = math.ceil(global_batch_size / world_size)
    num_micro_batches = math.ceil(share / max_micro_batch)
    return num_micro_batches, math.ceil(share / num_micro_batches)
