"""What batches are made of: how much of them is padding, and whether larger ones are quicker; pure."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from holdfast.quantity import say_bytes
from holdfast.train.batch.learning_rates import format_rates, scale_rates
from holdfast.train.lengths.padding import Padding, compare_paddings
from holdfast.train.tuning.facts import Lengths, Steps
from holdfast.train.tuning.findings import Finding, Trial
from holdfast.train.tuning.verdict import LEAST_GAIN

_FEW_ROWS = 16
_WORTH = 0.10  # from which on another padding, or another batch and learning rate, is worth a word


@dataclasses.dataclass(frozen=True, slots=True)
class Paddings:
    """The user's own batches as they are, and as other paddings would make them."""

    now: int
    """Positions that the model computes now, padding among them."""
    useful: float
    num_shapes: int
    others: tuple[Padding, ...]


def compare(lengths: Lengths | None) -> Paddings | None:
    """Paddings compared on measured lengths; None if the batches are no rows of unequal length."""
    if lengths is None or sum(map(len, lengths.rows)) < _FEW_ROWS:
        return None
    flat = [length for row in lengths.rows for length in row]
    now = sum(len(rows) * width for rows, width in zip(lengths.rows, lengths.widths, strict=True))
    if sum(flat) == now:
        return None
    widest = max(lengths.widths)
    others = compare_paddings(
        flat,
        batch_size=max(len(rows) for rows in lengths.rows),
        max_length=widest,
        multiple=_multiple(max(flat)),
        pool=len(lengths.rows),
    )
    shapes = {(len(rows), width) for rows, width in zip(lengths.rows, lengths.widths, strict=True)}
    return Paddings(now, sum(flat) / now, len(shapes), tuple(others))


def find_padding(steps: Steps, paddings: Paddings | None) -> list[Finding]:
    """Padding that is a large part of what is computed, where less of it is to be had."""
    if paddings is None:
        return []
    static = [one for one in paddings.others if one.name.startswith("buckets, multiple")]
    kept = [one for one in paddings.others if one.keeps_batches and one.name.startswith("longest, multiple")]
    best = min((*static, *kept), key=lambda one: one.positions)
    saved = 1 - best.positions / paddings.now
    if saved < _WORTH:
        return []
    simple = min(kept, key=lambda one: one.positions)
    packed = next((one for one in paddings.others if one.name.startswith("packed")), None)
    change = (
        f"{best.name[0].upper()}{best.name[1:]}: `holdfast.train.lengths.BucketBatches` makes such batches."
    )
    if best is simple:
        change = f"Pad to the {best.name} (`padding='longest', pad_to_multiple_of=`)."
    elif 1 - simple.positions / paddings.now >= _WORTH:
        share = simple.positions / paddings.now
        change += f" Padding to the {simple.name} alone: {share:.0%} of what is computed now."
    if packed is not None and packed.positions < best.positions:
        change += f" A causal model can be packed: {packed.positions / paddings.now:.0%}."
    place = None if steps.loader is None else steps.loader.making or steps.loader.place
    return [
        Finding(
            kind="padding",
            place=place or steps.call,
            seen=(
                f"{1 - paddings.useful:.0%} of what the model computes is padding "
                f"({_shapes(paddings.num_shapes)})"
            ),
            costs=f"{1 - paddings.useful:.0%} of the model's work",
            change=change,
            after=f"{best.positions / paddings.now:.0%} of the positions, {_shapes(best.num_shapes)}",
            share=saved,
        )
    ]


def find_batch(steps: Steps, now: Trial, trials: Sequence[Trial]) -> list[Finding]:
    """A larger batch, where that is quicker by more than the noise: the smallest of those that are.

    Args:
        steps: what plain steps have shown.
        now: the batch as it is.
        trials: larger ones, really run.
    """
    loader = steps.loader
    ran = [one for one in (now, *trials) if not one.failure]
    chosen = choose(ran)
    gain = chosen.items_per_s / now.items_per_s
    if loader is None or chosen is now or gain <= 1 + max(_WORTH, now.noise, chosen.noise):
        return []
    tried = ", ".join(f"{one.value}: {one.items_per_s / now.items_per_s:.2f}x" for one in ran)
    items = statistics.median(step.num_items for step in steps.steps)
    rule = rate_rule(steps.optimizer, steps.learning_rate, now.value, chosen.value, items / now.value)
    return [
        Finding(
            kind="batch",
            place=loader.place,
            seen=f"batch_size={now.value} is less than the machine can use: samples per second {tried}",
            costs=f"{1 - 1 / gain:.0%} of the time for each sample",
            change=f"`batch_size={chosen.value}`. {rule}",
            after=f"{gain:.2f}x the samples per second (measured)" + _memory(chosen),
            share=1 - 1 / gain,
        )
    ]


def choose(trials: Sequence[Trial]) -> Trial:
    """The smallest batch that is as fast as any, within what two steps of one program differ by."""
    ran = [one for one in trials if not one.failure]
    best_rate = max(one.items_per_s for one in ran)
    return next(one for one in ran if one.items_per_s >= best_rate * (1 - LEAST_GAIN))


def rate_rule(optimizer: str, rate: float | None, batch: int, chosen: int, parts: float) -> str:
    """What another batch asks of the learning rate, or how to keep the batch of an optimizer step.

    Args:
        optimizer: class of the optimizer.
        rate: the learning rate now.
        batch: samples that the loader gives at once now.
        chosen: and after the change.
        parts: batches that are accumulated for an optimizer step now.
    """
    factor = chosen / batch
    if parts >= 1.5 and parts / factor >= 1:
        return f"Accumulate {parts / factor:g} batches a step, not {parts:g}: then all else stays the same."
    if not rate:
        return "The learning rate has to follow (`holdfast.train.batch.scale_rates`)."
    rules = format_rates(scale_rates(rate, batch, chosen, optimizer=optimizer))
    return f"The learning rate, {rate:g} now, has to follow; try " + ", or ".join(rules.splitlines()) + "."


def fits_next(tried: Sequence[Trial], value: int, limit_bytes: int) -> bool:
    """True if a batch of `value` will fit, as far as a line through the two largest that ran can tell."""
    known = [one for one in tried if one.peak_bytes is not None and not one.failure]
    if not known:
        return True
    last = known[-1]
    assert last.peak_bytes is not None
    if len(known) < 2:
        return last.peak_bytes <= limit_bytes
    before = known[-2]
    assert before.peak_bytes is not None
    slope = (last.peak_bytes - before.peak_bytes) / (last.value - before.value)
    return last.peak_bytes + max(0.0, slope) * (value - last.value) <= limit_bytes


def _memory(trial: Trial) -> str:
    return "" if trial.peak_bytes is None else f", {say_bytes(trial.peak_bytes)} at the peak"


def _multiple(widest: int) -> int:
    """Widths are rounded up to an eighth of the longest row, as a power of two, from 8 to 64."""
    return min(64, max(8, 2 ** math.floor(math.log2(max(1, widest / 8)))))


def _shapes(number: int) -> str:
    return "1 shape" if number == 1 else f"{number} shapes"
