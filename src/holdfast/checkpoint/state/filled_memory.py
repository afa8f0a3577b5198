"""Memory that a restore fills: its ranges of addresses, their bytes, and mappings that are read-only."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Mapping, Sequence

import torch

from holdfast.checkpoint.state.tensors import laid_out_like
from holdfast.errors import InvalidInput
from holdfast.system.linux.memory_mappings import read_mappings

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


_ORIGIN = 'memory that is mapped read-only, such as that of np.load(mmap_mode="r")'
_MAX_NAMED = 5


def find_read_only(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors in memory that this process cannot write to.

    Blocks: 1 ms per 1000 mappings of the process.
    """
    if sys.platform != "linux":
        return []  # readers of checkpoints may run there
    ranges = [(start, stop) for start, stop, _ in read_mappings(lambda access: b"w" not in access)]
    stops = [stop for _, stop in ranges]
    found: list[str] = []
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu" or not tensor.numel() or tensor.layout is not torch.strided:
            continue
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        stop, at = start + (last + 1) * tensor.element_size(), bisect.bisect_right(stops, start)
        if at < len(ranges) and ranges[at][0] < stop:
            found.append(name)
    return found


def read_only_error(names: Sequence[str]) -> InvalidInput:
    """Return the error of a restore that would write to memory that is mapped read-only."""
    return InvalidInput(
        f"{_listed(names)} in {_ORIGIN}, so a restore cannot write to it. Nothing was changed. "
        "Put a copy into the state: tensor.clone(). Or leave it out with only=.",
        key=names[0],
    )


def describe_read_only(names: Sequence[str]) -> str:
    """Return a sentence about tensors in memory that is mapped read-only."""
    return (
        f"{_listed(names)} in {_ORIGIN}, so a restore would be refused. Put a copy into the state: "
        "tensor.clone()."
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{', '.join(names[:_MAX_NAMED])}{more} {'is' if len(names) == 1 else 'are'}"
