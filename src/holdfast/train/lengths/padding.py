"""What each way to pad would cost on measured lengths: useful share, shapes, positions; pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from holdfast.errors import InvalidInput
from holdfast.train.lengths.packs import first_fit


@dataclasses.dataclass(frozen=True, slots=True)
class Padding:
    """One way to bring sequences of unequal length into batches, and what it costs.

    Attributes:
        name: what is done, as a reader knows it.
        positions: tokens that the model computes, padding among them.
        useful: share of them that is no padding, 0 to 1.
        num_shapes: distinct (rows, width) of the batches; each is one more graph for a static compiler.
        relative: positions divided by those of padding to the longest of each batch.
        keeps_batches: True if the batches stay as they are, so that nothing but the padding changes.
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
    """What each way to pad would cost for sequences of these lengths, in the order in which they come.

    Counted in positions. Attention costs more than in proportion for long rows, so what is dear here is
    dearer still; packing pays only if attention is told where sequences end.

    Args:
        lengths: tokens of each sequence, as the batches come; longer ones than `max_length` count as cut.
        batch_size: sequences in a batch.
        max_length: what `padding="max_length"` pads to, and the length of a packed row; by default the
            longest sequence.
        multiple: what widths are rounded up to, in the ways that round.
        pool: batches whose sequences are sorted together, in the ways with buckets.

    Returns:
        In this order: to `max_length`; to the longest of the batch; that rounded up; buckets; buckets rounded
        up; packed by first fit.

    Raises:
        InvalidInput: no lengths, a length below 1, or a size below 1.
    """
    if not lengths or min(lengths) < 1 or min(batch_size, multiple, pool, max_length or 1) < 1:
        raise InvalidInput(
            "Paddings are compared on lengths of at least one token, in batches of at least one sequence: "
            f"got {len(lengths)} lengths (shortest {min(lengths, default=0)}), {batch_size=}, {max_length=}, "
            f"{multiple=}, {pool=}."
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


def say_paddings(paddings: Iterable[Padding]) -> str:
    """The comparison as a table for people, a line each."""
    lines = [f"{'padding':26s} {'useful':>7s} {'shapes':>7s} {'cost':>7s}"]
    lines += [
        f"{one.name:26s} {one.useful:7.0%} {one.num_shapes:7d} {one.relative:6.2f}x" for one in paddings
    ]
    return "\n".join(lines)


def _slices(values: Sequence[int], size: int) -> Iterable[Sequence[int]]:
    return (values[start : start + size] for start in range(0, len(values), size))


def _positions(batches: Iterable[tuple[int, int]]) -> int:
    return sum(rows * width for rows, width in batches)
