"""Byte ranges of a saved region that contain a smaller region: as few as possible; pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple


class Span(NamedTuple):
    """Range of a row-major tensor that begins and ends with elements of a wanted region.

    `at` and `sizes` are the part of the wanted region in it, relative to that region. Within the span, its
    elements have the strides of the tensor.
    """

    start: int  # element of the tensor
    num_items: int
    at: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def is_dense(self) -> bool:
        """True if the span contains only wanted elements."""
        return self.num_items == math.prod(self.sizes)


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor, in elements."""
    strides = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def spans(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], max_gap: int
) -> Iterator[Span]:
    """Yield the spans of a region that is not empty.

    Args:
        max_gap: maximum gap, in elements, that is read rather than skipped.
    """
    yield from _split(strides_of(shape), offsets, sizes, (0,) * len(shape), 0, max_gap)


def _split(
    strides: tuple[int, ...],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    at: tuple[int, ...],
    dim: int,
    max_gap: int,
) -> Iterator[Span]:
    """Split along the first dimension from `dim` on with large gaps.

    Gaps of inner dimensions are never larger, so the recursion ends at a small one.
    """
    while dim < len(sizes) and sizes[dim] == 1:
        dim += 1
    inner = 1 + sum((n - 1) * stride for n, stride in zip(sizes[dim + 1 :], strides[dim + 1 :], strict=True))
    if dim >= len(sizes) or strides[dim] - inner <= max_gap:
        start = sum((a + o) * stride for a, o, stride in zip(at, offsets, strides, strict=True))
        extent = 1 + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
        yield Span(start, extent, at, sizes)
        return
    for index in range(sizes[dim]):
        yield from _split(
            strides,
            offsets,
            (*sizes[:dim], 1, *sizes[dim + 1 :]),
            (*at[:dim], index, *at[dim + 1 :]),
            dim + 1,
            max_gap,
        )
