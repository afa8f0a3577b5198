"""Watches over tensors, which prove that they did not change in memory during a copy (note 013).

The kernel records writes to whole pages. So the extents of tensors in memory are the pages that only they
fill, which are watched, and edges on pages shared with other memory, which are saved when a watch begins.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import mmap
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from msgspec import Struct

from holdfast.checkpoint.stage.write_tracker import Range, WriteTracker, use_huge_pages
from holdfast.system.linux.memory_mappings import read_mappings

LARGE_BYTES = 32 << 10
"""Smaller tensors are copied before save() returns, because they share their pages with other memory."""
_get_num_bytes = operator.attrgetter("nbytes")
_GAP_BYTES = 256 << 10  # ranges as close as this are tracked as one: each costs a call to the kernel
_PAGE = mmap.PAGESIZE


class Edge(Struct, frozen=True):
    """Bytes of a tensor on a page that it shares with other memory."""

    index: int  # of the tensor
    address: int
    offset: int  # of these bytes in the tensor, in its own order
    num_bytes: int


class Extents(Struct, frozen=True):
    """The memory of some tensors: whole pages, which can be tracked, and edges, which cannot."""

    pages: tuple[tuple[int, int, int], ...]  # start, stop and the tensor's index, by start
    edges: tuple[Edge, ...]
    ranges: tuple[Range, ...]  # these cover all `pages`, and the small gaps between them
    indices: frozenset[int]  # of the tensors

    @classmethod
    def of(
        cls, tensors: Mapping[int, torch.Tensor], mappings: Sequence[Range], apart: Sequence[int] = ()
    ) -> Extents:
        """Return the extents of dense CPU tensors by index.

        No range crosses the end of one of the `mappings`, sorted memory that may be tracked, or includes one
        of the sorted addresses in `apart`, of tensors that are tracked separately.
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
        saved = ctypes.create_string_buffer(max(1, sum(edge.num_bytes for edge in self.edges)))
        at = ctypes.addressof(saved)
        for edge in self.edges:
            ctypes.memmove(at, edge.address, edge.num_bytes)
            at += edge.num_bytes
        return saved


def find_overlapping(places: Iterable[tuple[int, int, int]]) -> set[int]:
    """Return the indices of tensors, each at an address with its bytes, that share pages with another one."""
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


def read_private_mappings() -> tuple[list[Range], list[Range]]:
    """Return the writable mappings that other processes do not share, by start, in 1 ms per 1000 mappings.

    First those of anonymous memory, neighbours joined; then those of files, whose pages follow the file until
    this process has written to them.
    """
    anonymous: list[Range] = []
    of_files: list[Range] = []
    for start, stop, is_of_file in read_mappings(lambda access: access[:2] == b"rw" and access[3:] == b"p"):
        if is_of_file:
            of_files.append((start, stop))
        elif anonymous and anonymous[-1][1] == start:
            anonymous[-1] = anonymous[-1][0], stop
        else:
            anonymous.append((start, stop))
    return anonymous, of_files


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


_NOTHING = Extents.of({}, ())


class Watcher:
    """Starts watches over tensors, if the kernel records writes.

    `on_busy` is called if memory is not available; it may end the watches of others over it.
    """

    def __init__(self, on_busy: Callable[[], None] = lambda: None) -> None:
        self.refusal: str | None = None  # reason why this process cannot watch memory
        self.shared: frozenset[int] = frozenset()
        """Tensors of the last `locate` in memory that other processes may write to, or that still has pages
        of a file: a watch does not detect such changes."""
        self.overlapping: frozenset[int] = frozenset()
        """Large tensors that share pages: the end of a watch over one would end that of the others."""
        self._on_busy = on_busy
        self._of_files: frozenset[int] = frozenset()  # those of `shared` that may become private
        self._tracker: WriteTracker | None = None
        self._ids: list[int] = []
        self._places: dict[int, tuple[int, int]] = {}  # address and bytes of each large tensor
        self._views: Mapping[int, object] = {}  # order of those whose bytes are not simply in sequence
        self._anonymous: list[Range] = []  # mappings, see `read_private_mappings`
        self._of_file: list[Range] = []
        self._extents: dict[tuple[int, ...], Extents] = {}
        self._huge: frozenset[int] = frozenset()  # in huge pages as far as the kernel could
        try:
            self._tracker = WriteTracker()
        except OSError as error:
            self.refusal = error.strerror or str(error)

    def locate(self, tensors: list[torch.Tensor], large: Iterable[int]) -> None:
        """Find the tensors of a save, and skip those of the last one. Only the large ones may be watched."""
        before, self._ids = self._ids, list(map(id, tensors))
        chosen = {i: tensors[i] for i in large}
        found = zip(
            map(torch.Tensor.data_ptr, chosen.values()), map(_get_num_bytes, chosen.values()), strict=True
        )
        places, known = dict(zip(chosen, found, strict=True)), self._places
        views = {
            i: (tensor.stride(), tensor.is_conj(), tensor.is_neg())
            for i, tensor in chosen.items()
            if not tensor.is_contiguous() or tensor.is_complex()
        }
        new = set[int]()
        if has_moved := places != known or views != self._views:
            changed = {i for i in chosen if views.get(i) != self._views.get(i)}
            new.update(i for i in chosen if i in changed or places[i] != known.get(i))
            self._places, self._views = places, views
            self._anonymous, self._of_file = read_private_mappings()
            self.overlapping = frozenset(find_overlapping((at, size, i) for i, (at, size) in places.items()))
        if len(before) != len(tensors):
            new.update(range(len(tensors)))
        elif self._ids != before:
            new.update(i for i in range(len(tensors)) if self._ids[i] != before[i])
        new.update(self._of_files.intersection(range(len(tensors))))
        shared = self.shared.difference(new) | self._find_shared({i: tensors[i] for i in new})
        if has_moved or shared != self.shared:
            # The extents come last: a concurrent thread that finds them empty and fills them must not
            # treat newly shared memory as private.
            self.shared, self._extents, self._huge = shared, {}, frozenset()

    def _find_shared(self, tensors: Mapping[int, torch.Tensor]) -> set[int]:
        plain = {i: t for i, t in tensors.items() if t.device.type == "cpu" and t.nbytes}
        shared = {i for i, tensor in plain.items() if not is_within(tensor, self._anonymous)}
        if shared:  # or in memory that is new since the mappings were read
            self._anonymous, self._of_file = read_private_mappings()
        shared = {i for i in shared if not is_within(plain[i], self._anonymous)}
        of_files = {i for i in shared if is_within(plain[i], self._of_file)}
        places = {i: (plain[i].data_ptr(), plain[i].data_ptr() + plain[i].nbytes) for i in of_files}
        own = {i for i, place in places.items() if self._tracker is not None and self._tracker.is_own(*place)}
        self._of_files = frozenset(of_files.difference(own))
        return shared.difference(own)

    def start(self, tensors: Mapping[int, torch.Tensor]) -> WriteWatch:
        """WriteWatch tensors by index from now on; those that cannot be watched are left out.

        These are tensors on devices, in memory that other processes may share, or with gaps between their
        elements, and memory that another part of the process has registered with the kernel.

        Blocks: 10 ms per GB in pages of 4 KiB, 0.2 ms in huge pages.
        """
        if self._tracker is None or not tensors:
            return _NO_WATCH
        extents = self._find_extents(tensors)
        is_huge = self._huge.issuperset(tensors)
        if not self._try_start(extents, in_huge_pages=is_huge):
            self._on_busy()
            if not self._try_start(extents, in_huge_pages=is_huge):
                extents = self._start_each(tensors, extents)
        watched = {index: tensors[index] for index in extents.indices}
        return WriteWatch(self._tracker, extents, watched, extents.save_edges())

    def _try_start(self, extents: Extents, *, in_huge_pages: bool) -> bool:
        assert self._tracker is not None
        try:
            self._tracker.start(extents.ranges, in_huge_pages=in_huge_pages)
        except OSError:
            return False
        return True

    def _find_extents(self, tensors: Mapping[int, torch.Tensor]) -> Extents:
        key, known = tuple(tensors), self._extents  # a concurrent save may replace the attribute
        if key not in known:
            watchable = {i: t for i, t in tensors.items() if i not in self.shared and _is_watchable(t)}
            known[key] = Extents.of(watchable, self._anonymous, self._apart_from(watchable))
        return known[key]

    def _apart_from(self, indices: Collection[int]) -> list[int]:
        """Return the addresses of the large tensors outside of `indices`, sorted."""
        return sorted(address for i, (address, _) in self._places.items() if i not in indices)

    def _start_each(self, tensors: Mapping[int, torch.Tensor], extents: Extents) -> Extents:
        """Start tracking range by range; return extents without tensors that the kernel refuses."""
        assert self._tracker is not None
        started, refused, is_busy = [], [], False
        for extent in extents.ranges:
            try:
                self._tracker.start([extent])
                started.append(extent)
            except OSError as error:
                refused.append(extent)
                is_busy = is_busy or error.errno == errno.EBUSY  # another tracker has it, for now
        self._tracker.stop(started)
        accepted = extents.indices.difference(extents.touched_by(refused))
        accepted_tensors = {index: tensors[index] for index in sorted(accepted)}
        extents = Extents.of(accepted_tensors, self._anonymous, self._apart_from(accepted))
        if not self._try_start(extents, in_huge_pages=False):
            return _NOTHING
        if not is_busy:
            self._extents[tuple(tensors)] = extents
        return extents

    def use_huge_pages(self, tensors: Mapping[int, torch.Tensor], *, until: Callable[[], bool]) -> None:
        """Move the memory of large tensors into huge pages, once. A watch then costs a hundredth.

        None of them may be watched now. If `until()` is True, the work ends, and a later call continues it.

        Blocks: 0.2 to 2 s per GB of small pages; releases the GIL.
        """
        if self._tracker is None or self._huge.issuperset(tensors):
            return
        extents, known = self._find_extents(tensors), self._extents
        use_huge_pages(self._tracker.find_small(extents.ranges), until=until)
        if not until() and known is self._extents:
            self._huge |= frozenset(tensors)  # if the kernel had none left, asking again would not help

    def lose_huge_pages(self, indices: Iterable[int]) -> None:
        """Record that writes have divided the huge pages of watched tensors."""
        self._huge = self._huge.difference(indices)

    def close(self) -> None:
        """Release the kernel's record. No watch may be running."""
        if self._tracker is not None:
            self._tracker.close()
        self._tracker, self.refusal = None, "closed"


class WriteWatch(Struct, frozen=True):
    """A watch over some tensors, from its creation to its end.

    Bytes of a tensor on pages that it shares with other memory are not watched: they were saved when the
    watch began.
    """

    tracker: WriteTracker | None
    extents: Extents
    tensors: Mapping[int, torch.Tensor]  # the watched ones, by index
    edges: ctypes.Array[ctypes.c_char] | None

    def end(self, copies: Sequence[torch.Tensor] = (), *, continues: bool = False) -> list[int]:
        """End the watch, unless it continues; return the indices of tensors written since it began.

        The copies, by index, receive the bytes of shared pages that were saved when the watch began.
        """
        if self.tracker is None:
            return []
        written = self.extents.touched_by(self.tracker.find_written(self.extents.ranges))
        if not continues:
            self.cancel()
        if copies:
            self._complete(copies)
        return written

    def cancel(self) -> None:
        """End the watch without a result."""
        if self.tracker is not None:
            self.tracker.stop(self.extents.ranges)

    def _complete(self, copies: Sequence[torch.Tensor]) -> None:
        if self.edges is None:
            return
        at = ctypes.addressof(self.edges)
        addresses = {i: copies[i].data_ptr() for i, tensor in self.tensors.items() if tensor.is_contiguous()}
        for edge in self.extents.edges:
            to = addresses.get(edge.index)
            if to is not None:
                ctypes.memmove(to + edge.offset, at, edge.num_bytes)
            else:
                saved = ctypes.string_at(at, edge.num_bytes)
                _put_in_memory_order(copies[edge.index], self.tensors[edge.index], edge.offset, saved)
            at += edge.num_bytes


_NO_WATCH = WriteWatch(None, _NOTHING, {}, None)


def _put_in_memory_order(copy: torch.Tensor, tensor: torch.Tensor, offset: int, saved: bytes) -> None:
    """Put bytes of a dense tensor, at an offset in its memory, into a copy with another order of elements."""
    order, item_bytes = memory_order(tensor), tensor.element_size()
    assert order is not None
    left = torch.arange(offset // item_bytes, (offset + len(saved)) // item_bytes, device="cpu")
    positions = torch.zeros_like(left)
    for dimension in reversed(order):
        positions += left % tensor.shape[dimension] * copy.stride(dimension)
        left = left // tensor.shape[dimension]
    items = torch.frombuffer(bytearray(saved), dtype=torch.uint8).view(-1, item_bytes)
    copy.view(-1).view(torch.uint8).view(-1, item_bytes)[positions] = items


def _is_watchable(tensor: torch.Tensor) -> bool:
    is_plain = tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg()
    # Memory of others may begin anywhere; the edges of such a tensor would end within elements.
    is_aligned = tensor.is_contiguous() or not tensor.data_ptr() % tensor.element_size()
    return is_plain and is_aligned and is_dense(tensor)
