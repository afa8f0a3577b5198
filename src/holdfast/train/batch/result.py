"""Result of a batch-size search, and what its size means for learning rates and accumulation; pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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


class ScaledRate(Struct, frozen=True):
    """A learning rate scaled by one rule.

    Attributes:
        rule: "linear" or "square root".
        rate: the scaled learning rate.
        made_for: the optimizers that the rule was published for.
        source: the publication.
        also: other changes that the source recommends, or an empty string.
    """

    rule: str
    rate: float
    made_for: str
    source: str
    also: str


class Accumulation(Struct, frozen=True):
    """Gradient accumulation that yields a global batch from micro-batches.

    Attributes:
        global_batch_size: samples of all ranks in an optimizer step.
        world_size: number of ranks.
        num_micro_batches: forward and backward passes of each rank per optimizer step.
        micro_batch_size: samples in the largest of them.
    """

    global_batch_size: int
    world_size: int
    num_micro_batches: int
    micro_batch_size: int


def scale_rates(
    rate: float, tuned_batch_size: int, batch_size: int, *, optimizer: str = ""
) -> list[ScaledRate]:
    """Return the learning rate for another batch size, by each rule.

    A rule gives a starting point only. In our short run of AdamW the linear rule did better.

    Args:
        rate: the tuned learning rate.
        tuned_batch_size: global batch size that it was tuned for.
        batch_size: the new global batch size.
        optimizer: class name of the optimizer. The rule for this optimizer comes first.

    Source: Goyal et al. 2017 (linear, with warm-up, for SGD); Krizhevsky 2014 and Malladi et al. 2022 (square
        root, the latter for Adam and RMSprop).
    """
    if not (rate > 0 and tuned_batch_size > 0 and batch_size > 0):
        raise InvalidInput(
            f"A learning rate of {rate} for a batch of {tuned_batch_size} cannot be scaled to {batch_size}."
        )
    factor = batch_size / tuned_batch_size
    linear = ScaledRate(
        "linear", rate * factor, "SGD", "Goyal et al. 2017, arXiv 1706.02677", "warm up over the first epochs"
    )
    root = ScaledRate(
        "square root",
        rate * math.sqrt(factor),
        "Adam, AdamW, RMSprop",
        "Malladi et al. 2022, arXiv 2205.10287; Krizhevsky 2014, arXiv 1404.5997",
        f"the former also scales 1-beta by {factor:.3g} and eps by {1 / math.sqrt(factor):.3g}",
    )
    is_adaptive = any(word in optimizer.lower() for word in ("adam", "rms", "lamb", "adafactor", "lion"))
    return [root, linear] if is_adaptive else [linear, root]


def format_rates(rates: Iterable[ScaledRate]) -> str:
    """Format the scaled rates for display, one line each, with their sources."""
    return "\n".join(
        f"{one.rate:.3g} by the {one.rule} rule, for {one.made_for} ({one.source}; {one.also})"
        for one in rates
    )


def plan_accumulation(global_batch_size: int, max_micro_batch: int, world_size: int = 1) -> Accumulation:
    """Return the accumulation that yields a global batch from micro-batches of limited size.

    Args:
        global_batch_size: samples of all ranks in an optimizer step.
        max_micro_batch: the most samples of one rank in a forward and backward pass.
        world_size: number of ranks.

    Raises:
        InvalidInput: a number is below 1, or the global batch is smaller than the number of ranks.
    """
    if min(global_batch_size, max_micro_batch, world_size) < 1 or global_batch_size < world_size:
        raise InvalidInput(
            f"A global batch of {global_batch_size} cannot be divided among {world_size} ranks with "
            f"micro-batches of at most {max_micro_batch} samples: every rank needs at least one sample."
        )
    share = math.ceil(global_batch_size / world_size)
    num_micro_batches = math.ceil(share / max_micro_batch)
    return Accumulation(
        global_batch_size, world_size, num_micro_batches, math.ceil(share / num_micro_batches)
    )
