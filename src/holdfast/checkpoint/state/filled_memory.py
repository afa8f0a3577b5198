"""Memory that a restore fills: its ranges of addresses, and comparison of their bytes."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import torch

from holdfast.checkpoint.state.tensors import laid_out_like

Range = tuple[int, int]
"""First address, and the one after the last."""


class FilledMemory:
    """Ranges of addresses that are or will be filled, disjoint and in order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> None:
        """Add a range."""
        first, last = self._touched(start, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def overlap(self, start: int, stop: int) -> list[Range]:
        """Return the parts of a range that were added before."""
        first, last = self._touched(start, stop)
        found = zip(self._starts[first:last], self._stops[first:last], strict=True)
        return [(max(start, low), min(stop, high)) for low, high in found]

    def _touched(self, start: int, stop: int) -> Range:
        """Return the slice of the ranges that share an address with the given one."""
        return bisect.bisect_right(self._stops, start), bisect.bisect_left(self._starts, stop)


def range_of(tensor: torch.Tensor) -> Range | None:
    """Return the addresses of a tensor; None if it does not fill a range of them with its own bytes."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return None
    if tensor.is_conj() or tensor.is_neg():
        return None
    if not tensor.is_contiguous() and torch.empty_like(tensor, device="meta").stride() != tensor.stride():
        return None  # a copy has other strides if elements overlap or have gaps between them
    start = tensor.data_ptr()
    return start, start + tensor.nbytes


def holds(live: torch.Tensor, new: torch.Tensor, ranges: Sequence[Range]) -> bool:
    """Return True if a tensor has the bytes of another one at some addresses."""
    start = live.data_ptr()
    new = laid_out_like(new.to(device=live.device, dtype=live.dtype), live)
    here, there = _bytes(live), _bytes(new)
    return all(torch.equal(here[a - start : b - start], there[a - start : b - start]) for a, b in ranges)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
