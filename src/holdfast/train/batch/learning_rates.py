"""Learning rates scaled to another batch size by published rules, and gradient accumulation; pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec import Struct

from holdfast.errors import InvalidInput


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
