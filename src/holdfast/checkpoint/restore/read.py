"""Parallel reads with verification: chunks go into a buffer, are hashed, and then delivered."""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct

from holdfast.checkpoint.format.hashes import DIGITS, chunk_ranges, hash_chunks
from holdfast.checkpoint.format.part import DataFile, Part
from holdfast.checkpoint.store.contract import Store
from holdfast.checkpoint.store.tiered import decisive_error
from holdfast.errors import Corrupt, HoldfastError, Internal, InvalidInput, NotFound
from holdfast.system.units import some

READ_BYTES = 8 << 20
"""Limit of bytes for reading adjacent chunks together, at least one chunk; a store may set another."""

ByteRange = tuple[int, int]
"""Start and stop in a file."""
Sink = Callable[[int, memoryview], None]
"""Receiver of the verified bytes of one `Want`: their offset in it, and a view that is valid during the call.

Several threads call it at once, on disjoint ranges, each byte once.
"""


def discard(offset: int, view: memoryview) -> None:
    """Receive bytes that are only verified."""


class Want(NamedTuple):
    """Request to deliver `num_bytes` from byte `start` of a data file to `sink`."""

    start: int
    num_bytes: int
    sink: Sink


class FileRead(Struct, frozen=True):
    """Requests to read one data file."""

    part: Part
    wanted: Sequence[Want]
    frozen: bool = False  # from the file of frozen tensors

    @property
    def file(self) -> DataFile:
        """Size and hashes of the file."""
        name = self.part.file_name(frozen=self.frozen)
        if name not in self.part.files:
            raise Corrupt(
                f"{self.part.what} names no file of frozen tensors, but has some.",
                step=self.part.step,
                rank=self.part.rank,
                key=name,
            )
        return self.part.files[name]


class ReadStats(Struct, frozen=True):
    """Statistics of a read. `num_bytes` counts whole chunks, as read from the store."""

    num_bytes: int
    num_reads: int
    seconds: float
    sources: Mapping[str, int] = {}  # bytes by the URL of the copy they came from
    recovered_from: tuple[str, ...] = ()  # damage in nearer copies, where a farther one was good

    def plus(self, other: ReadStats) -> ReadStats:
        """Return the sum of two reads, one after the other."""
        return ReadStats(
            self.num_bytes + other.num_bytes,
            self.num_reads + other.num_reads,
            self.seconds + other.seconds,
            Counter(self.sources) + Counter(other.sources),  # without those of no bytes
            self.recovered_from + other.recovered_from,
        )


class Read(Struct):
    """One read of adjacent chunks of a file, with the requests that it serves."""

    name: str
    part: Part
    file: DataFile
    start: int
    stop: int
    wanted: list[Want] = []


def read(
    store: Store,
    jobs: Iterable[FileRead],
    *,
    num_threads: int | None = 4,
    on_bytes: Callable[[int], None] | None = None,
    on_error: Callable[[HoldfastError], None] | None = None,
) -> ReadStats:
    """Read data files, verify every chunk, and deliver the requested bytes to their sinks.

    Reads each needed chunk once. Memory: one buffer per thread, as long as the longest read.

    Args:
        jobs: requests, at most one job per data file.
        num_threads: threads that read, hash and copy; None for what suits the nearest tier.
        on_bytes: called with the size of each read when it is done, by one thread at a time.
        on_error: called with each damaged chunk or failed read, by one thread at a time. The read continues
            then, and nothing is delivered from there.

    Blocks: until all is read, or until the first error has stopped all threads.
    """
    if num_threads is not None and num_threads < 1:
        raise InvalidInput(f"num_threads is {num_threads}; at least 1 thread must read.")
    began = time.perf_counter()
    jobs, reads, suited = list(jobs), [], 1
    for job in jobs:
        nearest = _nearest(store, job).properties
        reads += plan_reads(job, nearest.read_bytes)
        suited = max(suited, nearest.parallel_reads)
    num_threads = num_threads or suited
    longest = max((one.stop - one.start for one in reads), default=0)
    lock, num_delivered = threading.Lock(), 0
    sources: Counter[str] = Counter()
    recovered_from: list[str] = []

    def do(read: Read, buffer: memoryview) -> None:
        nonlocal num_delivered
        fetched = fetch(store, read, buffer)
        if fetched.view is None and on_error is None:
            raise decisive_error(fetched.errors)
        num_bytes = 0 if fetched.view is None else deliver(read, fetched.view)
        with lock:
            if fetched.view is None and on_error is not None:
                for error in fetched.errors:
                    on_error(error)
            else:
                recovered_from.extend(map(str, fetched.errors))
            num_delivered += num_bytes
            sources.update(fetched.sources)
            if on_bytes is not None:
                on_bytes(len(buffer))

    _work(deque(reads), min(num_threads, len(reads)), longest, do)
    wanted_bytes = sum(want.num_bytes for job in jobs for want in job.wanted)
    if on_error is None and num_delivered != wanted_bytes:
        raise Internal(
            f"{wanted_bytes} bytes were requested from {store.url}, and {num_delivered} were delivered."
        )
    num_bytes, seconds = sum(one.stop - one.start for one in reads), time.perf_counter() - began
    return ReadStats(num_bytes, len(reads), seconds, sources, tuple(recovered_from))


def _nearest(store: Store, job: FileRead) -> Store:
    """Return the copy that a job's file is read from first."""
    *nearer, last = store.copies()
    name = job.part.file_name(frozen=job.frozen)
    for copy in nearer:
        with contextlib.suppress(HoldfastError):  # a copy that cannot answer is as one without the file
            if copy.size(name) is not None:
                return copy
    return last


def plan_reads(job: FileRead, read_bytes: int = READ_BYTES) -> list[Read]:
    """Return the reads of a job: its chunks, adjacent ones together, up to `read_bytes` or one chunk."""
    file = job.file
    chunk_bytes, file_bytes = file.chunk_bytes, file.num_bytes
    limit = max(read_bytes // chunk_bytes, 1)
    name = job.part.file_name(frozen=job.frozen)
    wanted = sorted((want for want in job.wanted if want.num_bytes), key=attrgetter("start"))
    reads: list[Read] = []
    position = 0  # chunks before this one are in a read already
    first = 0  # first chunk of the open read
    for start, num_bytes, _ in wanted:
        chunk, end = start // chunk_bytes, (start + num_bytes - 1) // chunk_bytes + 1
        if chunk > position or not reads:
            first = position = max(chunk, position)
        while position < end:
            if position - first in (0, limit):
                first = position
                reads.append(Read(name, job.part, file, first * chunk_bytes, first * chunk_bytes))
            position = min(end, first + limit)
            reads[-1].stop = min(position * chunk_bytes, file_bytes)
    distribute(wanted, reads)
    return reads


def distribute(wanted: list[Want], reads: list[Read]) -> None:
    """Add the requests to the reads of one file that they touch."""
    starts = [one.start for one in reads]
    for want in wanted:
        stop = want.start + want.num_bytes
        index = max(bisect_right(starts, want.start) - 1, 0)  # it may begin before the first of them
        while index < len(reads) and starts[index] < stop:
            reads[index].wanted.append(want)
            index += 1


def _work(
    todo: deque[Read], num_threads: int, buffer_bytes: int, do: Callable[[Read, memoryview], None]
) -> None:
    """Do all reads with this number of threads, the calling one included; the first error stops them."""
    errors: list[BaseException] = []

    def loop() -> None:
        try:
            if not todo:
                return
            view = memoryview(mmap.mmap(-1, buffer_bytes))  # page-aligned, as direct reads need
            while not errors:
                try:
                    read = todo.popleft()
                except IndexError:  # another thread took the last one
                    return
                do(read, view[: read.stop - read.start])
        except BaseException as error:  # noqa: BLE001 - must reach the caller from whatever thread
            errors.append(error)

    threads = [threading.Thread(target=loop, name=f"holdfast-read-{i}") for i in range(1, num_threads)]
    try:
        for thread in threads:
            thread.start()
        loop()
    finally:
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise errors[0]


class Fetched(NamedTuple):
    """Result of one read: verified bytes, or errors."""

    view: memoryview | None
    sources: Mapping[str, int]  # bytes by the URL of the good copy
    errors: list[HoldfastError]  # of copies that were tried before a good one, or of all


def fetch(store: Store, read: Read, buffer: memoryview) -> Fetched:
    """Return the verified bytes of one read, each chunk from its nearest good copy.

    `buffer` is as long as the read, and is filled unless a copy has the bytes in memory.
    """
    view: memoryview | None = None
    sources: dict[str, int] = {}
    errors: list[HoldfastError] = []
    missing: list[HoldfastError] = []  # a nearer tier need not have an object
    left = [(read.start, read.stop)]
    for copy in store.copies():
        try:
            view = _read_from(copy, read, buffer, left, view)
        except NotFound as error:
            missing.append(error)
            continue
        except HoldfastError as error:
            errors.append(error)
            continue
        num_good, left, found = find_damage(read, view, left)
        errors += found
        if num_good:
            sources[copy.url] = num_good
        if not left:
            return Fetched(view, sources, errors)
    return Fetched(None, {}, errors or missing[-1:])


def _read_from(
    copy: Store, read: Read, buffer: memoryview, ranges: list[ByteRange], view: memoryview | None
) -> memoryview:
    """Return the bytes of a read, unverified: those of some ranges from this copy, the others of `view`."""
    num_bytes = read.stop - read.start
    if view is None and copy.properties.zero_copy_views:
        return copy.read_view(read.name, read.start, num_bytes)
    whole = buffer[:num_bytes]
    if view is not None and view.obj is not buffer.obj:
        whole[:] = view
    for start, stop in ranges:
        copy.read_into(read.name, start, whole[start - read.start : stop - read.start])
    return whole


def find_damage(
    read: Read, view: memoryview, ranges: list[ByteRange]
) -> tuple[int, list[ByteRange], list[HoldfastError]]:
    """Return the number of good bytes of a read, and the ranges of damaged chunks, with an error for each.

    Only `ranges` are checked, which are ranges of the file, of whole chunks.
    """
    chunk_bytes, hashes = read.file.chunk_bytes, read.file.hashes
    num_good = 0
    damaged: list[ByteRange] = []
    errors: list[HoldfastError] = []
    for start, stop in ranges:
        num_good += stop - start
        found = hash_chunks(view[start - read.start : stop - read.start], chunk_bytes)
        at = start // chunk_bytes * DIGITS
        if found == hashes[at : at + len(found)]:
            continue
        for i, (low, high) in enumerate(chunk_ranges(stop - start, chunk_bytes)):
            number, digits = start // chunk_bytes + i, found[i * DIGITS : (i + 1) * DIGITS]
            if digits != read.file.hash_of(number):
                num_good -= high - low
                damaged.append((start + low, start + high))
                errors.append(_damaged_chunk(read, number, start + low, start + high, digits))
    return num_good, damaged, errors


def _damaged_chunk(read: Read, number: int, start: int, stop: int, found: str) -> Corrupt:
    inside = tensors_at(read.part, start, stop, frozen=read.name != read.part.file_name(frozen=False))
    return Corrupt(
        f"{read.name} is damaged in chunk {number} (bytes {start} to {stop - 1}), which holds "
        f"{some(inside, 5) or 'the header'}: expected xxh3:{read.file.hash_of(number)}, found "
        f"xxh3:{found}.",
        step=read.part.step,
        rank=read.part.rank,
        key=inside[0] if inside else read.name,
    )


def tensors_at(part: Part, start: int, stop: int, *, frozen: bool = False) -> list[str]:
    """Return the names of the tensors with bytes between two offsets of a data file."""
    placed = zip(part.shards, part.starts, strict=True)
    found = (
        shard.name
        for shard, at in placed
        if shard.frozen == frozen and shard.num_bytes and at < stop and start < at + shard.num_bytes
    )
    return list(dict.fromkeys(found))  # a rank may have several regions of a tensor


def deliver(read: Read, view: memoryview) -> int:
    """Deliver verified bytes to the sinks that requested them, and return their number."""
    first, last, num_bytes = read.start, read.stop, 0
    for start, length, sink in read.wanted:
        low, high = max(start, first), min(start + length, last)
        sink(low - start, view[low - first : high - first])
        num_bytes += high - low
    return num_bytes
