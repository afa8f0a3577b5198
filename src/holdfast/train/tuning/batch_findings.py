"""Findings about batches: their share of padding, and whether larger ones are faster; pure."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from holdfast.system.units import format_bytes, plural
from holdfast.train.batch.learning_rates import format_rates, scale_rates
from holdfast.train.lengths.padding import Padding, compare_paddings
from holdfast.train.tuning.findings import Finding, TrialResult
from holdfast.train.tuning.measurements import RowLengths, StepMeasurements
from holdfast.train.tuning.verdict import MIN_GAIN

_MIN_ROWS = 16
_MIN_BATCH_GAIN = 0.10  # smallest gain for which to suggest another padding or batch size


@dataclasses.dataclass(frozen=True, slots=True)
class PaddingComparison:
    """The user's batches with their own padding, and with other paddings."""

    now: int
    """Positions that the model computes now, including padding."""
    useful: float
    num_shapes: int
    others: tuple[Padding, ...]


def compare(lengths: RowLengths | None) -> PaddingComparison | None:
    """Return a comparison of paddings on measured lengths, or None for batches without unequal rows."""
    if lengths is None or sum(map(len, lengths.rows)) < _MIN_ROWS:
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
    return PaddingComparison(now, sum(flat) / now, len(shapes), tuple(others))


def find_padding(steps: StepMeasurements, paddings: PaddingComparison | None) -> list[Finding]:
    """Find padding that is a large share of the computation and avoidable."""
    if paddings is None:
        return []
    static = [one for one in paddings.others if one.name.startswith("buckets, multiple")]
    kept = [one for one in paddings.others if one.keeps_batches and one.name.startswith("longest, multiple")]
    best = min((*static, *kept), key=lambda one: one.positions)
    saved = 1 - best.positions / paddings.now
    if saved < _MIN_BATCH_GAIN:
        return []
    simple = min(kept, key=lambda one: one.positions)
    packed = next((one for one in paddings.others if one.name.startswith("packed")), None)
    change = f"{best.name[0].upper()}{best.name[1:]}: use `holdfast.train.lengths.BucketBatches`."
    if best is simple:
        change = f"Pad to the {best.name} (`padding='longest', pad_to_multiple_of=`)."
    elif 1 - simple.positions / paddings.now >= _MIN_BATCH_GAIN:
        share = simple.positions / paddings.now
        change += f" Padding to the {simple.name} alone: {share:.0%} of the current positions."
    if packed is not None and packed.positions < best.positions:
        change += f" Packing, for a causal model: {packed.positions / paddings.now:.0%}."
    place = None if steps.loader is None else steps.loader.sample_code or steps.loader.place
    return [
        Finding(
            kind="padding",
            place=place or steps.call,
            seen=(
                f"{1 - paddings.useful:.0%} of the model's positions are padding "
                f"({plural(paddings.num_shapes, 'shape')})"
            ),
            costs=f"{1 - paddings.useful:.0%} of the model's work",
            change=change,
            after=f"{best.positions / paddings.now:.0%} of the positions, {plural(best.num_shapes, 'shape')}",
            share=saved,
        )
    ]


def find_batch(steps: StepMeasurements, now: TrialResult, trials: Sequence[TrialResult]) -> list[Finding]:
    """Find the smallest batch size that is clearly faster than the current one."""
    loader = steps.loader
    ran = [one for one in (now, *trials) if not one.failure]
    chosen = choose(ran)
    gain = chosen.items_per_s / now.items_per_s
    if loader is None or chosen is now or gain <= 1 + max(_MIN_BATCH_GAIN, now.noise, chosen.noise):
        return []
    tried = ", ".join(f"{one.value}: {one.items_per_s / now.items_per_s:.2f}x" for one in ran)
    items = statistics.median(step.num_items for step in steps.steps)
    rule = rate_rule(steps.optimizer, steps.learning_rate, now.value, chosen.value, items / now.value)
    return [
        Finding(
            kind="batch",
            place=loader.place,
            seen=f"batch_size={now.value} does not use the whole machine: samples per second {tried}",
            costs=f"{1 - 1 / gain:.0%} of the time per sample",
            change=f"`batch_size={chosen.value}`. {rule}",
            after=f"{gain:.2f}x the samples per second (measured)" + _memory(chosen),
            share=1 - 1 / gain,
        )
    ]


def choose(trials: Sequence[TrialResult]) -> TrialResult:
    """Return the smallest batch size within the noise of the fastest."""
    ran = [one for one in trials if not one.failure]
    best_rate = max(one.items_per_s for one in ran)
    return next(one for one in ran if one.items_per_s >= best_rate * (1 - MIN_GAIN))


def rate_rule(optimizer: str, rate: float | None, batch: int, chosen: int, parts: float) -> str:
    """Return the advice on the learning rate for another batch size, or on accumulation instead.

    Args:
        batch: the current batch size of the loader.
        parts: batches that are accumulated per optimizer step now.
    """
    factor = chosen / batch
    if parts >= 1.5 and parts / factor >= 1:
        return f"Accumulate {parts / factor:g} batches per step instead of {parts:g}: nothing else changes."
    if not rate:
        return "Adapt the learning rate (`holdfast.train.batch.scale_rates`)."
    rules = format_rates(scale_rates(rate, batch, chosen, optimizer=optimizer))
    return f"Adapt the learning rate, now {rate:g}: try " + ", or ".join(rules.splitlines()) + "."


def fits_next(tried: Sequence[TrialResult], value: int, limit_bytes: int) -> bool:
    """Return True if a batch of `value` should fit, extrapolating the two largest that ran."""
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


def _memory(trial: TrialResult) -> str:
    return "" if trial.peak_bytes is None else f", {format_bytes(trial.peak_bytes)} at the peak"


def _multiple(widest: int) -> int:
    """Return the multiple for rounding widths: about an eighth of the longest row, from 8 to 64."""
    return min(64, max(8, 2 ** math.floor(math.log2(max(1, widest / 8)))))
