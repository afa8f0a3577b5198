"""Which bytes of a saved region hold a smaller region of it: as few stretches as reading allows; pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple


class Span(NamedTuple):
    """A stretch of a row-major tensor that begins and ends with elements of a wanted box.

    `at` and `lengths` say which part of the wanted box it holds, counted from that box's corner. Inside the
    stretch its elements stand as the strides of the tensor say.
    """

    start: int  # element of the tensor
    num_items: int
    at: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def is_dense(self) -> bool:
        """True if there is nothing in it but wanted elements."""
        return self.num_items == math.prod(self.lengths)


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements from one index to the next along each dimension of a row-major tensor."""
    strides = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def spans(
    shape: tuple[int, ...], offsets: tuple[int, ...], lengths: tuple[int, ...], max_gap: int
) -> Iterator[Span]:
    """The stretches that hold a box that is not empty.

    Args:
        shape: of the row-major tensor.
        offsets: where the box begins in it.
        lengths: of the box.
        max_gap: elements that are better read along than passed over.
    """
    yield from _split(strides_of(shape), offsets, lengths, (0,) * len(shape), 0, max_gap)


def _split(
    strides: tuple[int, ...],
    offsets: tuple[int, ...],
    lengths: tuple[int, ...],
    at: tuple[int, ...],
    dim: int,
    max_gap: int,
) -> Iterator[Span]:
    """Split along the first dimension from `dim` on that has more than one index, if its gaps are large.

    Gaps further in are never larger, so one that is small ends it.
    """
    while dim < len(lengths) and lengths[dim] == 1:
        dim += 1
    inner = 1 + sum(
        (n - 1) * stride for n, stride in zip(lengths[dim + 1 :], strides[dim + 1 :], strict=True)
    )
    if dim >= len(lengths) or strides[dim] - inner <= max_gap:
        start = sum((a + o) * stride for a, o, stride in zip(at, offsets, strides, strict=True))
        extent = 1 + sum((n - 1) * stride for n, stride in zip(lengths, strides, strict=True))
        yield Span(start, extent, at, lengths)
        return
    for index in range(lengths[dim]):
        yield from _split(
            strides,
            offsets,
            (*lengths[:dim], 1, *lengths[dim + 1 :]),
            (*at[:dim], index, *at[dim + 1 :]),
            dim + 1,
            max_gap,
        )
