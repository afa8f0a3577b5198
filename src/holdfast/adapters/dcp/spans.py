"""Byte ranges of a saved region that contain a smaller region: as few as possible; pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple


class Span(NamedTuple):
    """Range of a row-major tensor that begins and ends with elements of a wanted box.

    `at` and `lengths` are the part of the wanted box in it, relative to that box. Within the span, its
    elements have the strides of the tensor.
    """

    start: int  # element of the tensor
    num_items: int
    at: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def is_dense(self) -> bool:
        """True if the span contains only wanted elements."""
        return self.num_items == math.prod(self.lengths)


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor, in elements."""
    strides = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def spans(
    shape: tuple[int, ...], offsets: tuple[int, ...], lengths: tuple[int, ...], max_gap: int
) -> Iterator[Span]:
    """Yield the spans of a box that is not empty.

    Args:
        shape: shape of the row-major tensor.
        offsets: start of the box in it.
        lengths: shape of the box.
        max_gap: maximum gap, in elements, that is read rather than skipped.
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
    """Split along the first dimension from `dim` on with large gaps.

    Gaps of inner dimensions are never larger, so the recursion ends at a small one.
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
