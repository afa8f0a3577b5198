"""Shared reads: each chunk is read by one rank and sent to the others that need it, for a slow home."""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch
from msgspec import Struct

from holdfast.checkpoint.format.part import Part
from holdfast.checkpoint.ranks import RankGroup
from holdfast.checkpoint.restore.read import READ_BYTES, FileRead, Read, ReadStats, deliver, distribute, fetch
from holdfast.checkpoint.store.contract import Store
from holdfast.checkpoint.store.tiered import decisive_error
from holdfast.errors import Corrupt, HoldfastError, NotFound, RetryLater
from holdfast.system.rawbytes import view_bytes

if TYPE_CHECKING:
    from torch.distributed import Work

OTHER_RANKS = "other ranks"
"""Source of bytes that came from local folders of other hosts."""

_MAX_AHEAD = 4  # blocks that are read, or being sent, before a rank waits

Key = tuple[int, bool]  # a data file: the rank that wrote it, and whether it is that of the frozen tensors
Need = tuple[int, int, int, int, int]  # rank, frozen, first chunk, chunk after the last, chunk_bytes


class Block(Struct, frozen=True):
    """Adjacent chunks of a file that the same ranks need; `reader` reads and verifies them for all."""

    key: Key
    start: int  # byte in the file
    stop: int
    ranks: tuple[int, ...]
    reader: int


class Lending(Struct, frozen=True):
    """Ranks that read files for others that have no copy."""

    lenders: Mapping[int, Sequence[int]]  # ranks that have the files, by saved rank
    part_of: Callable[[int], Part]  # returns the part of a saved rank


def assign_blocks(
    needs: Sequence[Iterable[Need]], lenders: Mapping[int, Sequence[int]] | None = None
) -> list[Block]:
    """Return the blocks of all files, each with its reader: the rank with the least to read.

    Pure, so that every rank computes the same. `lenders` are the ranks that can read a file, by saved rank;
    by default all that need it.
    """
    by_file: dict[Key, list[tuple[int, int, int]]] = {}
    chunk_bytes_of: dict[Key, int] = {}
    for rank, rows in enumerate(needs):
        for owner, frozen, first, last, chunk_bytes in rows:
            by_file.setdefault((owner, bool(frozen)), []).append((first, last, rank))
            chunk_bytes_of[owner, bool(frozen)] = chunk_bytes
    loads = [0] * len(needs)
    blocks = []
    for key in sorted(by_file):
        chunk_bytes = chunk_bytes_of[key]
        for first, last, ranks in _segments(by_file[key], max(READ_BYTES // chunk_bytes, 1)):
            able = ranks if lenders is None else lenders[key[0]]
            reader = min(able, key=lambda rank: (loads[rank], rank))
            loads[reader] += last - first
            blocks.append(Block(key, first * chunk_bytes, last * chunk_bytes, ranks, reader))
    return blocks


def _segments(
    intervals: list[tuple[int, int, int]], limit: int
) -> Iterable[tuple[int, int, tuple[int, ...]]]:
    """Yield runs of at most `limit` chunks, with the ranks that need them."""
    borders = sorted({edge for first, last, _ in intervals for edge in (first, last)})
    starting: dict[int, list[int]] = {}
    ending: dict[int, list[int]] = {}
    for first, last, rank in intervals:
        starting.setdefault(first, []).append(rank)
        ending.setdefault(last, []).append(rank)
    count: dict[int, int] = {}
    for border, after in zip(borders, [*borders[1:], borders[-1]], strict=True):
        for rank in ending.get(border, ()):
            count[rank] -= 1
        for rank in starting.get(border, ()):
            count[rank] = count.get(rank, 0) + 1
        ranks = tuple(sorted(rank for rank, times in count.items() if times))
        for first in range(border, after, limit) if ranks else ():
            yield first, min(first + limit, after), ranks


def read_shared(
    store: Store,
    jobs: Sequence[FileRead],
    group: RankGroup,
    *,
    on_bytes: Callable[[int], None] | None = None,
    lending: Lending | None = None,
) -> ReadStats:
    """Read each chunk on one rank, which sends it to the others; else as `read`.

    With `lending` a chunk is read by one of the ranks that have it, whether or not that one needs it.

    Memory: a few blocks of 8 MiB.

    Args:
        jobs: requests of this rank, at most one job per data file.
        on_bytes: called with the size of each block when this rank has it.

    Ranks: collective.
    Blocks: until this rank has received every block that it needs, and sent every block that others need.
    """
    began = time.perf_counter()
    wanted = {(job.part.rank, job.frozen): job for job in jobs}
    needs = group.gather([need for job in wanted.values() for need in _needs(job)])
    blocks = assign_blocks(needs, lending.lenders if lending else None)
    mine = [block for block in blocks if group.rank in (*block.ranks, block.reader)]
    if lending is not None:
        lent = {block.key for block in mine} - wanted.keys()
        wanted |= {key: FileRead(lending.part_of(key[0]), [], frozen=key[1]) for key in lent}
    reads = _reads(mine, wanted)
    own = [one for block, one in zip(mine, reads, strict=True) if block.reader == group.rank]
    ahead = _Ahead(store, own)
    try:
        errors = _transfer(list(zip(mine, reads, strict=True)), ahead, group, on_bytes)
    finally:
        ahead.close()
    if errors:
        raise errors[0]
    received = sum(
        one.stop - one.start
        for block, one in zip(mine, reads, strict=True)
        if lending and block.reader != group.rank
    )
    return ahead.stats.plus(ReadStats(0, 0, time.perf_counter() - began, {OTHER_RANKS: received}))


def _needs(job: FileRead) -> list[Need]:
    """Return the chunks that a job needs, as intervals that do not touch."""
    chunk_bytes = job.file.chunk_bytes
    intervals: list[list[int]] = []
    for start, num_bytes, _ in sorted(job.wanted, key=lambda want: want.start):
        if not num_bytes:
            continue
        first, last = start // chunk_bytes, (start + num_bytes - 1) // chunk_bytes + 1
        if intervals and first <= intervals[-1][1]:
            intervals[-1][1] = max(intervals[-1][1], last)
        else:
            intervals.append([first, last])
    return [(job.part.rank, int(job.frozen), first, last, chunk_bytes) for first, last in intervals]


def _reads(mine: list[Block], wanted: dict[Key, FileRead]) -> list[Read]:
    """Return blocks as reads, each with the requests of this rank."""
    reads: dict[Key, list[Read]] = {}
    every = []
    for block in mine:
        job = wanted[block.key]
        stop = min(block.stop, job.file.num_bytes)
        name = job.part.file_name(frozen=job.frozen)
        every.append(Read(name, job.part, job.file, block.start, stop))
        reads.setdefault(block.key, []).append(every[-1])
    for key, of_file in reads.items():
        wants = [want for want in wanted[key].wanted if want.num_bytes]
        distribute(sorted(wants, key=lambda want: want.start), of_file)
    return every


def _transfer(
    pairs: list[tuple[Block, Read]], ahead: _Ahead, group: RankGroup, on_bytes: Callable[[int], None] | None
) -> list[HoldfastError]:
    """Read, send or receive all blocks. The order is the same on every rank, which excludes deadlocks."""
    errors: list[HoldfastError] = []
    sending: deque[tuple[torch.Tensor, list[Work]]] = deque()
    for block, read in pairs:
        if block.reader == group.rank:
            data, error = ahead.next_block()
            others = [rank for rank in block.ranks if rank != group.rank]
            sending.append((data, [group.send(data, rank) for rank in others]))
        else:
            data = torch.empty(read.stop - read.start + 1, dtype=torch.uint8, device="cpu")
            _wait(group.receive(data, block.reader))
            error = _received_error(data, block, read)
        if error is not None:
            errors.append(error)
            ahead.give_up()
        else:
            deliver(read, _view(data))
        if on_bytes is not None:
            on_bytes(read.stop - read.start)
        while len(sending) > _MAX_AHEAD:
            _finish(sending.popleft())
    while sending:
        _finish(sending.popleft())
    return errors


def _finish(sent: tuple[torch.Tensor, list[Work]]) -> None:
    for transfer in sent[1]:
        _wait(transfer)


def _wait(transfer: Work) -> None:
    try:
        transfer.wait()
    except RuntimeError as error:
        raise RetryLater(f"A rank was lost while the ranks sent blocks to each other: {error}") from error


_TROUBLES: tuple[type[HoldfastError], ...] = (RetryLater, Corrupt, NotFound)
"""Errors that are sent with a block, by number."""


def _number(error: HoldfastError) -> int:
    return next((i for i, kind in enumerate(_TROUBLES) if isinstance(error, kind)), 0)


def _view(data: torch.Tensor) -> memoryview:
    """Return the bytes of a block without the last one, which is its error number."""
    return view_bytes(data)[:-1]


def _received_error(data: torch.Tensor, block: Block, read: Read) -> HoldfastError | None:
    """Return the error that the reader of a block has sent with it; None for a good one."""
    number = int(data[-1])
    if not number:
        return None
    message = f"{read.name} could not be read by rank {block.reader}, which reads it for others."
    return _TROUBLES[number - 1](message, step=read.part.step, rank=read.part.rank, key=read.name)


class _Ahead:
    """Thread that reads and verifies a rank's own blocks, a few ahead of their use."""

    def __init__(self, store: Store, reads: list[Read]) -> None:
        self.stats = ReadStats(0, 0, 0.0)
        self._store, self._left = store, iter(reads)
        self._is_over = False
        # Simple queues: Ctrl+C inside a Condition can leave its lock locked.
        self._todo: SimpleQueue[Read | None] = SimpleQueue()  # None ends the thread
        self._ready: SimpleQueue[tuple[torch.Tensor, HoldfastError | None]] = SimpleQueue()
        for _ in range(_MAX_AHEAD):
            self._todo.put(next(self._left, None))
        self._thread = threading.Thread(target=self._run, name="holdfast-read-ahead", daemon=True)
        self._thread.start()

    def next_block(self) -> tuple[torch.Tensor, HoldfastError | None]:
        """Return the next block, which ends with its error number, and its error if any.

        Blocks: until it is read.
        """
        block = self._ready.get()
        self._todo.put(next(self._left, None))
        return block

    def give_up(self) -> None:
        """Stop reading. The remaining blocks are sent as unreadable."""
        self._is_over = True

    def close(self) -> None:
        """Stop the thread, and wait for its end."""
        self.give_up()
        self._todo.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (read := self._todo.get()) is not None:
            self._ready.put(self._read(read))

    def _read(self, read: Read) -> tuple[torch.Tensor, HoldfastError | None]:
        # page-aligned, as direct reads need
        data = torch.frombuffer(mmap.mmap(-1, read.stop - read.start + 1), dtype=torch.uint8)
        error: HoldfastError | None
        if self._is_over:
            message = f"{read.name} was not read, since another block could not be read."
            error = RetryLater(message, step=read.part.step, rank=read.part.rank, key=read.name)
        else:
            error = self._fetch(read, _view(data))
        data[-1] = 0 if error is None else 1 + _number(error)
        return data, error

    def _fetch(self, read: Read, view: memoryview) -> HoldfastError | None:
        fetched = fetch(self._store, read, view)
        if fetched.view is None:
            return decisive_error(fetched.errors)
        if fetched.view is not view:
            view[:] = fetched.view
        recovered_from = tuple(map(str, fetched.errors))
        self.stats = self.stats.plus(ReadStats(len(view), 1, 0.0, fetched.sources, recovered_from))
        return None
