"""Extents of tensors in memory: the whole pages that they fill, and the bytes before and after."""

from __future__ import annotations

import bisect
import ctypes
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from holdfast.checkpoint.stage.write_tracker import Range
from holdfast.system.linux.memory_mappings import read_mappings

LARGE_BYTES = 32 << 10
"""Smaller tensors are copied before save() returns, because they share their pages with other memory."""
_GAP_BYTES = 256 << 10  # ranges as close as this are tracked as one: each costs a call to the kernel
_PAGE = mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class Edge:
    """Bytes of a tensor on a page that it shares with other memory."""

    index: int  # of the tensor
    address: int
    offset: int  # of these bytes in the tensor, in its own order
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Extents:
    """The memory of some tensors: whole pages, which can be tracked, and edges, which cannot."""

    pages: tuple[tuple[int, int, int], ...]  # start, stop and the tensor's index, by start
    edges: tuple[Edge, ...]
    ranges: tuple[Range, ...]  # these cover all `pages`, and the small gaps between them
    num_edge_bytes: int
    indices: frozenset[int]  # of the tensors

    @classmethod
    def of(
        cls, tensors: Mapping[int, torch.Tensor], mappings: Sequence[Range], apart: Sequence[int] = ()
    ) -> Extents:
        """Return the extents of dense tensors by index.

        Args:
            tensors: CPU tensors without gaps between their elements.
            mappings: memory that may be tracked, by start; no range crosses the end of one.
            apart: addresses of tensors that are tracked separately, sorted; no range includes one.
        """
        pages: list[tuple[int, int, int]] = []
        edges: list[Edge] = []
        for index, tensor in tensors.items():
            start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
            low, high = -(-start // _PAGE) * _PAGE, stop // _PAGE * _PAGE
            if low >= high:
                edges.append(Edge(index, start, 0, stop - start))
                continue
            pages.append((low, high, index))
            if start < low:
                edges.append(Edge(index, start, 0, low - start))
            if high < stop:
                edges.append(Edge(index, high, high - start, stop - high))
        pages.sort()
        return cls(
            tuple(pages),
            tuple(edges),
            tuple(_coalesce([(low, high) for low, high, _ in pages], mappings, apart)),
            sum(edge.num_bytes for edge in edges),
            frozenset(tensors),
        )

    def touched_by(self, ranges: Iterable[Range]) -> list[int]:
        """Return the indices of the tensors that have pages in `ranges`, in order."""
        starts = [low for low, _, _ in self.pages]
        longest = max((high - low for low, high, _ in self.pages), default=0)
        found: set[int] = set()
        for start, stop in ranges:
            first = bisect.bisect_left(starts, start - longest)
            for low, high, index in self.pages[first : bisect.bisect_left(starts, stop)]:
                if low < stop and high > start:
                    found.add(index)
        return sorted(found)

    def save_edges(self) -> ctypes.Array[ctypes.c_char]:
        """Return the current bytes of all edges, one after the other."""
        saved = ctypes.create_string_buffer(max(1, self.num_edge_bytes))
        at = ctypes.addressof(saved)
        for edge in self.edges:
            ctypes.memmove(at, edge.address, edge.num_bytes)
            at += edge.num_bytes
        return saved


def find_overlapping(places: Iterable[tuple[int, int, int]]) -> set[int]:
    """Return the indices of tensors that share pages with another one.

    Args:
        places: first address, bytes and index of each tensor.
    """
    found: set[int] = set()
    reached, last = 0, -1  # end of the memory so far, and the tensor that ends there
    for start, num_bytes, index in sorted(places):
        low, high = -(-start // _PAGE) * _PAGE, (start + num_bytes) // _PAGE * _PAGE
        if low < reached and low < high:
            found.update((index, last))
        if high > reached:
            reached, last = high, index
    return found


def is_dense(tensor: torch.Tensor) -> bool:
    """Return True if the elements fill their memory without gaps, each once."""
    return tensor.is_contiguous() or memory_order(tensor) is not None


def memory_order(tensor: torch.Tensor) -> list[int] | None:
    """Return the dimensions from the slowest to the fastest in memory; None if the tensor is not dense."""
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    order = [dimension for dimension in order if tensor.shape[dimension] != 1]
    stride = 1
    for dimension in reversed(order):
        if tensor.stride(dimension) != stride:
            return None
        stride *= tensor.shape[dimension]
    return order


@dataclass(frozen=True, slots=True)
class PrivateMappings:
    """Address ranges that other processes do not share, by start."""

    anonymous: list[Range]  # neighbours are joined
    of_files: list[Range]  # their pages follow the file until this process has written to them

    @classmethod
    def read(cls) -> PrivateMappings:
        """Return the writable mappings of this process.

        Blocks: 1 ms per 1000 mappings.
        """
        anonymous: list[Range] = []
        of_files: list[Range] = []
        for start, stop, is_of_file in read_mappings(
            lambda access: access[:2] == b"rw" and access[3:] == b"p"
        ):
            if is_of_file:
                of_files.append((start, stop))
            elif anonymous and anonymous[-1][1] == start:
                anonymous[-1] = anonymous[-1][0], stop
            else:
                anonymous.append((start, stop))
        return cls(anonymous, of_files)


def is_within(tensor: torch.Tensor, mappings: Sequence[Range]) -> bool:
    """Return True if all bytes of a tensor are in one of `mappings`."""
    start = tensor.data_ptr()
    at = bisect.bisect_right(mappings, (start, 1 << 64)) - 1
    return at >= 0 and start + tensor.nbytes <= mappings[at][1]


def _coalesce(ranges: Sequence[Range], mappings: Sequence[Range], apart: Sequence[int]) -> Iterable[Range]:
    """Join sorted ranges across small gaps, within one mapping and without separate tensors."""
    current: Range | None = None
    limit = 0  # the end of the mapping of `current`, or the next separate tensor
    for start, stop in ranges:
        if current is not None and start <= current[1] + _GAP_BYTES and stop <= limit:
            current = current[0], max(current[1], stop)
            continue
        if current is not None:
            yield current
        current = start, stop
        mapping = bisect.bisect_right(mappings, (start, 1 << 64)) - 1
        next_apart = bisect.bisect_left(apart, start)
        limit = min(
            mappings[mapping][1] if mapping >= 0 else stop,
            apart[next_apart] if next_apart < len(apart) else 1 << 64,
        )
    if current is not None:
        yield current
