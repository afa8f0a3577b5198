"""Limits of the machine for the same bytes: copies in memory, raw writes and raw reads."""

from __future__ import annotations

import errno
import functools
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from amounts import DEPTHS
from idle import wait_idle
from pagecache import evict
from states import Subject

BLOCK_BYTES = 16 << 20
READ_BLOCK_BYTES = 2 << 20
ALIGN_BYTES = 4096
MEMCPY_REPEATS = 3


def measure(subject: Subject, directory: Path) -> dict[str, float]:
    """Seconds of every limit for the bytes of `subject`, measured in `directory`.

    Keys: memcpy_1_s, memcpy_s (fastest of one thread and torch's default), write_s, read_s, and each
    raw depth as write_qN_s and read_qN_s. `direct` is 1.0 if the file system took O_DIRECT.
    """
    found = copy_in_memory(subject)
    path = directory / "raw"
    direct = takes_direct(directory)
    for depth in DEPTHS:
        path.unlink(missing_ok=True)
        wait_idle(directory)
        found[f"write_q{depth}_s"] = write_raw(path, subject.num_bytes, depth, direct=direct)
    found |= {f"read_q{depth}_s": seconds for depth, seconds in read_file_raw(path).items()}
    path.unlink()
    found["write_s"] = min(found[f"write_q{depth}_s"] for depth in DEPTHS)
    found["read_s"] = min(found[f"read_q{depth}_s"] for depth in DEPTHS)
    return found | {"direct": float(direct)}


class MemoryCopy:
    """Copy of the state, tensor by tensor, into touched host memory (pinned if the state is on a GPU).

    Attributes:
        single_s: fastest of the first copies with one thread.
        default_s: with torch's number of threads.
    """

    def __init__(self, subject: Subject) -> None:
        self._pin = subject.device.type == "cuda"
        self._sources = list(subject.tensors().values())
        self._targets = [
            torch.zeros_like(tensor, device="cpu", pin_memory=self._pin) for tensor in self._sources
        ]
        threads = torch.get_num_threads()
        self._threads = threads
        self.run()
        self.default_s = min(self.run() for _ in range(MEMCPY_REPEATS))
        self._threads = 1
        self.single_s = min(self.run() for _ in range(MEMCPY_REPEATS))
        self._threads = threads if self.default_s < self.single_s else 1

    def run(self) -> float:
        """Copy once with the faster number of threads, and return the seconds."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            started = time.perf_counter()
            for source, target in zip(self._sources, self._targets, strict=True):
                target.copy_(source, non_blocking=self._pin)
            if self._pin:
                torch.cuda.synchronize()
            return time.perf_counter() - started
        finally:
            torch.set_num_threads(before)


def copy_in_memory(subject: Subject) -> dict[str, float]:
    """Seconds to copy the state in memory."""
    copy = MemoryCopy(subject)
    fastest = min(copy.single_s, copy.default_s)
    return {"memcpy_1_s": copy.single_s, "memcpy_n_s": copy.default_s, "memcpy_s": fastest}


def write_raw(path: Path, num_bytes: int, depth: int, *, direct: bool) -> float:
    """Seconds to write a new file from aligned memory, `depth` writes at once, and fsync it."""
    path.unlink(missing_ok=True)
    source = _noise_to_write()
    padded = -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
    view = memoryview(source)

    def write_every(first: int, fd: int) -> None:
        for start in range(first * BLOCK_BYTES, padded, depth * BLOCK_BYTES):
            count = min(BLOCK_BYTES, padded - start)
            at = start % len(source)
            part = view[at : at + count]
            _finish(lambda done, p=part, s=start: os.pwrite(fd, p[done:], s + done), count)

    started = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o644)
    try:
        os.posix_fallocate(fd, 0, padded)
        _in_parallel(write_every, fd, depth)
        os.ftruncate(fd, num_bytes)
        os.fsync(fd)
    finally:
        os.close(fd)
    _sync_directory(path.parent)
    return time.perf_counter() - started


def best_write_depth(num_bytes: int, directory: Path, depths: Sequence[int] = DEPTHS) -> int:
    """Return the depth of the fastest raw write. Nothing is written if there is only one."""
    if len(depths) == 1:
        return depths[0]
    return min(depths, key=lambda depth: write_and_delete(num_bytes, directory, depth))


def write_and_delete(num_bytes: int, directory: Path, depth: int) -> float:
    """Seconds of a raw write on an idle disk; its file is deleted."""
    path, direct = directory / "raw", takes_direct(directory)
    wait_idle(directory)
    seconds = write_raw(path, num_bytes, depth, direct=direct)
    path.unlink()
    return seconds


def read_raw(path: Path, depth: int, *, direct: bool) -> float:
    """Seconds to read a whole file into small aligned buffers, `depth` reads at once."""
    size = path.stat().st_size
    buffers = [memoryview(aligned_noise(READ_BLOCK_BYTES)) for _ in range(depth)]

    def read_every(first: int, fd: int) -> None:
        for start in range(first * READ_BLOCK_BYTES, size, depth * READ_BLOCK_BYTES):
            count = min(READ_BLOCK_BYTES, size - start)
            # O_DIRECT wants whole blocks, also for the end of a file that stops within one
            _finish(lambda done, s=start: os.preadv(fd, [buffers[first][done:]], s + done), count)

    started = time.perf_counter()
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        _in_parallel(read_every, fd, depth)
    finally:
        os.close(fd)
    return time.perf_counter() - started


def read_file_raw(path: Path, depths: Sequence[int] = DEPTHS) -> dict[int, float]:
    """Seconds to read a whole file that is not in the page cache, at each depth."""
    direct = takes_direct(path.parent)
    seconds: dict[int, float] = {}
    for depth in depths:
        evict(path)
        seconds[depth] = read_raw(path, depth, direct=direct)
    return seconds


def takes_direct(directory: Path) -> bool:
    """True if the file system of `directory` takes O_DIRECT."""
    path = directory / "direct"
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


@functools.cache
def _noise_to_write() -> mmap.mmap:
    return aligned_noise(BLOCK_BYTES * max(DEPTHS))  # once: beside a training, it must not take its cores


def aligned_noise(num_bytes: int) -> mmap.mmap:
    """Touched, page-aligned memory that does not compress: some disks and hosts skip zeros."""
    buffer = mmap.mmap(-1, num_bytes)
    buffer.write(os.urandom(num_bytes))
    return buffer


def _in_parallel(action: Callable[[int, int], None], fd: int, depth: int) -> None:
    if depth == 1:
        action(0, fd)
        return
    with ThreadPoolExecutor(depth) as pool:
        list(pool.map(action, range(depth), [fd] * depth))


def _finish(transfer: Callable[[int], int], count: int) -> None:
    """Repeat a transfer that may be short until `count` bytes are done."""
    done = 0
    while done < count:
        moved = transfer(done)
        if moved <= 0:
            raise OSError(errno.EIO, f"Transfer stopped after {done} of {count} bytes.")
        done += moved


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
