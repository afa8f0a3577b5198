"""Cost of each way to pad sequences of given lengths: useful share, shapes, positions; pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct

from holdfast.errors import InvalidInput
from holdfast.system.units import plural
from holdfast.train.lengths.batches import first_fit


class Padding(Struct, frozen=True):
    """One way to batch sequences of unequal length, and its cost.

    Attributes:
        name: the common name of the method.
        positions: tokens that the model computes, including padding.
        useful: share of them that is not padding, 0 to 1.
        num_shapes: distinct (rows, width) of the batches. Each is one more graph for a static compiler.
        relative: positions divided by those of padding to the longest of each batch.
        keeps_batches: True if the batches keep their samples, so that only the padding changes.
    """

    name: str
    positions: int
    useful: float
    num_shapes: int
    relative: float
    keeps_batches: bool


def compare_paddings(
    lengths: Sequence[int],
    *,
    batch_size: int,
    max_length: int | None = None,
    multiple: int = 64,
    pool: int = 20,
) -> list[Padding]:
    """Return the cost of each way to pad sequences of these lengths, in their order.

    The cost is counted in positions. Attention costs more than that for long rows, so expensive methods are
    even more expensive. Packing helps only if attention respects the ends of sequences.

    Args:
        lengths: tokens of each sequence, in the order of the batches. Longer ones than `max_length` count as
            truncated.
        batch_size: sequences in a batch.
        max_length: width for `padding="max_length"` and for packed rows. Default: the longest sequence.
        multiple: widths are rounded up to a multiple of this, in the methods that round.
        pool: number of batches whose sequences are sorted together, in the methods with buckets.

    Returns:
        In this order: padding to `max_length`; to the longest of the batch; that, rounded up; buckets;
        buckets, rounded up; packed by first fit.
    """
    if not lengths or min(lengths) < 1 or min(batch_size, multiple, pool, max_length or 1) < 1:
        raise InvalidInput(
            "compare_paddings() needs lengths of at least one token and sizes of at least 1, got "
            f"{plural(len(lengths), 'length')} (shortest {min(lengths, default=0)}), {batch_size=}, "
            f"{max_length=}, {multiple=}, {pool=}."
        )
    cap = max_length or max(lengths)
    cut = [min(length, cap) for length in lengths]
    plain = list(_slices(cut, batch_size))
    bucketed = [
        batch for part in _slices(cut, batch_size * pool) for batch in _slices(sorted(part), batch_size)
    ]
    round_up = lambda width: min(cap, math.ceil(width / multiple) * multiple)  # noqa: E731
    longest = [(len(batch), max(batch)) for batch in plain]
    sorted_longest = [(len(batch), max(batch)) for batch in bucketed]
    packed = [(1, cap)] * len(first_fit(cut, cap))
    shapes = {
        f"max_length={cap}": [(rows, cap) for rows, _ in longest],
        "longest": longest,
        f"longest, multiple of {multiple}": [(rows, round_up(width)) for rows, width in longest],
        "buckets": sorted_longest,
        f"buckets, multiple of {multiple}": [(rows, round_up(width)) for rows, width in sorted_longest],
        f"packed to {cap}": packed,
    }
    base = _positions(longest)
    return [
        Padding(
            name=name,
            positions=_positions(batches),
            useful=sum(cut) / _positions(batches),
            num_shapes=len(set(batches)),
            relative=_positions(batches) / base,
            keeps_batches=not name.startswith(("buckets", "packed")),
        )
        for name, batches in shapes.items()
    ]


def format_paddings(paddings: Iterable[Padding]) -> str:
    """Format the comparison as a table, one line each."""
    lines = [f"{'padding':26s} {'useful':>7s} {'shapes':>7s} {'cost':>7s}"]
    lines += [
        f"{one.name:26s} {one.useful:7.0%} {one.num_shapes:7d} {one.relative:6.2f}x" for one in paddings
    ]
    return "\n".join(lines)


def _slices(values: Sequence[int], size: int) -> Iterable[Sequence[int]]:
    return (values[start : start + size] for start in range(0, len(values), size))


def _positions(batches: Iterable[tuple[int, int]]) -> int:
    return sum(rows * width for rows, width in batches)
