"""Batches of sequences of unequal length: buckets, and the cost of padding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from msgspec import Struct

from holdfast.errors import InvalidInput
from holdfast.system.units import plural
from holdfast.train.data.batches import Batches, fingerprint, keep_two

__all__ = ["Batches", "BucketBatches", "Padding", "compare_paddings", "first_fit"]


@final
class BucketBatches(Batches):
    """Global batches of samples of similar length. Yields lists of the indices of this rank.

    All samples are shuffled, sorted by length within pools of several batches, and divided into batches,
    which are shuffled again. Pad each batch to a multiple of 64 or so to get few distinct shapes.

    Args:
        lengths: tokens of each sample.
        batch_size: samples of all ranks in one optimizer step.
        pool: number of batches whose samples are sorted together. 0 only shuffles.
        **options: as for `Batches`: `seed`, `accumulation_steps`, `drop_last`, `rank`, `world_size`.

    Raises:
        InvalidInput: an argument is out of range, or there are fewer samples than ranks.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, *, pool: int = 20, **options: Any) -> None:
        super().__init__(batch_size, **options)
        self._lengths = torch.as_tensor(lengths, dtype=torch.int64)
        self._mark = fingerprint(lengths)
        self._pool = pool
        self._orders: dict[int, list[int]] = {}  # by epoch; two
        self._check_samples(len(lengths), f", {pool=}", is_wrong=pool < 0)

    def _count_units(self, epoch: int) -> int:
        return len(self._lengths)

    def _identity(self) -> dict[str, Any]:
        return {"lengths": self._mark, "pool": self._pool}

    def _units(self, epoch: int, offsets: Sequence[int]) -> list[int]:
        order = keep_two(self._orders, epoch, lambda: self._order(epoch))
        return [order[offset] for offset in offsets]

    def _order(self, epoch: int) -> list[int]:
        """Return all samples of an epoch, in order."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        order = torch.randperm(len(self._lengths), generator=generator)
        if self._pool == 0:
            return order.tolist()
        pools = order.split(self._pool * self.batch_size)
        order = torch.cat([pool[self._lengths[pool].argsort(stable=True)] for pool in pools])
        num_full = len(order) // self.batch_size  # the short batch stays last
        full = order[: num_full * self.batch_size].view(num_full, self.batch_size)
        full = full[torch.randperm(num_full, generator=generator)]
        return torch.cat([full.flatten(), order[full.numel() :]]).tolist()


def first_fit(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Pack each sequence into the first row with room. Return the indices of each row.

    Takes time proportional to n log n.

    Raises:
        InvalidInput: a sequence is longer than a row, or empty.

    Source: D. S. Johnson, "Near-optimal bin packing algorithms", 1973: at most 1.7 times the fewest rows.
    """
    if wrong := [length for length in lengths if not 1 <= length <= row_length]:
        raise InvalidInput(
            f"A sequence of {max(wrong)} tokens does not fit in a row of {row_length} (one of {len(wrong)} "
            "that are too long or empty). Truncate or split sequences before packing, or use longer rows."
        )
    # A tree in which each node has the largest free length of the rows below it. Leaves are rows.
    num_leaves = 1 << max(0, (len(lengths) - 1).bit_length())
    room = [row_length] * (2 * num_leaves)
    rows: list[list[int]] = []
    for index, length in enumerate(lengths):
        node = 1
        while node < num_leaves:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        if node - num_leaves == len(rows):
            rows.append([])
        rows[node - num_leaves].append(index)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return rows


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


def _slices(values: Sequence[int], size: int) -> Iterable[Sequence[int]]:
    return (values[start : start + size] for start in range(0, len(values), size))


def _positions(batches: Iterable[tuple[int, int]]) -> int:
    return sum(rows * width for rows, width in batches)
