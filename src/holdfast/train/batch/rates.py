"""What a learning rate becomes with another batch, by known rules; and how to keep the batch; pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from holdfast.errors import InvalidInput


@dataclasses.dataclass(frozen=True, slots=True)
class ScaledRate:
    """What one rule makes of a learning rate.

    Attributes:
        rule: "linear" or "square root".
        rate: the learning rate by that rule.
        made_for: the optimizers that the rule was found for.
        source: where it was found.
        also: what else the source changes, or an empty string.
    """

    rule: str
    rate: float
    made_for: str
    source: str
    also: str


@dataclasses.dataclass(frozen=True, slots=True)
class Accumulation:
    """How ranks make a global batch of several small ones.

    Attributes:
        global_batch: samples in an optimizer step, of all ranks.
        world_size: how many ranks there are.
        num_parts: forward and backward passes of each rank in an optimizer step.
        largest_part: samples in the largest of them.
    """

    global_batch: int
    world_size: int
    num_parts: int
    largest_part: int


def scale_rates(rate: float, tuned_batch: int, batch: int, *, optimizer: str = "") -> list[ScaledRate]:
    """The learning rate for `batch`, by each rule, from one that was good for `tuned_batch`.

    A rule is where to begin to try, no more: on a short run of AdamW the linear one did better here.

    Args:
        rate: the learning rate that was tuned.
        tuned_batch: samples in an optimizer step, of all ranks, when it was tuned.
        batch: samples in an optimizer step now.
        optimizer: class of the optimizer; the rule that was found for it comes first.

    Raises:
        InvalidInput: a number is not above 0.

    Source: Goyal et al. 2017 (linear, with warm-up, for SGD); Krizhevsky 2014 and Malladi et al. 2022 (square
        root, the latter for Adam and RMSprop).
    """
    if not (rate > 0 and tuned_batch > 0 and batch > 0):
        raise InvalidInput(f"A rate of {rate} for a batch of {tuned_batch} cannot be scaled to {batch}.")
    factor = batch / tuned_batch
    linear = ScaledRate(
        "linear",
        rate * factor,
        "SGD",
        "Goyal et al. 2017, arXiv 1706.02677",
        "warm up over the first epochs",
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


def say_rates(rates: Iterable[ScaledRate]) -> str:
    """The rules as lines for people, each with its source."""
    return "\n".join(
        f"{one.rate:.3g} by the {one.rule} rule, for {one.made_for} ({one.source}; {one.also})"
        for one in rates
    )


def accumulate_to(global_batch: int, size: int, world_size: int = 1) -> Accumulation:
    """How to keep a global batch where each rank holds at most `size` samples at once.

    Args:
        global_batch: samples in an optimizer step, of all ranks.
        size: the most samples of one rank in a forward and backward pass.
        world_size: how many ranks there are.

    Raises:
        InvalidInput: a number is below 1, or the global batch does not give every rank a sample.
    """
    if min(global_batch, size, world_size) < 1 or global_batch < world_size:
        raise InvalidInput(
            f"A global batch of {global_batch} cannot be made by {world_size} ranks of at most {size} "
            "samples each: every rank needs at least one."
        )
    share = math.ceil(global_batch / world_size)
    num_parts = math.ceil(share / size)
    return Accumulation(global_batch, world_size, num_parts, math.ceil(share / num_parts))
