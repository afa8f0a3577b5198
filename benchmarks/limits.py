"""What the machine can do at best with the same bytes: copy them in memory, write and read them raw."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from pagecache import evict
from states import Subject

BLOCK_BYTES = 16 << 20
ALIGN_BYTES = 4096
DEPTHS = (1, 2, 4)
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
        found[f"write_q{depth}_s"] = write_raw(path, subject.num_bytes, depth, direct=direct)
    found |= {f"read_q{depth}_s": seconds for depth, seconds in read_file_raw(path).items()}
    path.unlink()
    found["write_s"] = min(found[f"write_q{depth}_s"] for depth in DEPTHS)
    found["read_s"] = min(found[f"read_q{depth}_s"] for depth in DEPTHS)
    return found | {"direct": float(direct)}


def copy_in_memory(subject: Subject) -> dict[str, float]:
    """Seconds to copy the state tensor by tensor into touched host memory (pinned if it is on a GPU)."""
    pin = subject.device.type == "cuda"
    sources = list(subject.tensors().values())
    targets = [torch.zeros_like(tensor, device="cpu", pin_memory=pin) for tensor in sources]

    def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=pin)
        if pin:
            torch.cuda.synchronize()

    copy()
    default_s = _fastest(copy)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    single_s = _fastest(copy)
    torch.set_num_threads(threads)
    return {"memcpy_1_s": single_s, "memcpy_n_s": default_s, "memcpy_s": min(single_s, default_s)}


def write_raw(path: Path, num_bytes: int, depth: int, *, direct: bool) -> float:
    """Seconds to write a new file from aligned memory, `depth` writes at once, and fsync it."""
    path.unlink(missing_ok=True)
    source = aligned_noise(BLOCK_BYTES * max(DEPTHS))
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


def read_raw(path: Path, depth: int, *, direct: bool) -> float:
    """Seconds to read a whole file into small aligned buffers, `depth` reads at once."""
    size = path.stat().st_size
    buffers = [memoryview(aligned_noise(BLOCK_BYTES)) for _ in range(depth)]

    def read_every(first: int, fd: int) -> None:
        for start in range(first * BLOCK_BYTES, size, depth * BLOCK_BYTES):
            count = min(BLOCK_BYTES, size - start)
            # O_DIRECT wants whole blocks, also for the end of a file that stops within one
            _finish(lambda done, s=start: os.preadv(fd, [buffers[first][done:]], s + done), count)

    started = time.perf_counter()
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        _in_parallel(read_every, fd, depth)
    finally:
        os.close(fd)
    return time.perf_counter() - started


def read_file_raw(path: Path) -> dict[int, float]:
    """Seconds to read a whole file that is not in the page cache, at each depth."""
    direct = takes_direct(path.parent)
    seconds: dict[int, float] = {}
    for depth in DEPTHS:
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


def aligned_noise(num_bytes: int) -> mmap.mmap:
    """Touched, page-aligned memory that does not compress: some disks and hosts skip zeros."""
    buffer = mmap.mmap(-1, num_bytes)
    buffer.write(os.urandom(num_bytes))
    return buffer


def _fastest(action: Callable[[], None]) -> float:
    times = []
    for _ in range(MEMCPY_REPEATS):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return min(times)


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
