"""Check of a folder's disk: bytes are written, synced, read back and compared; its clock."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

from holdfast.jobs.node.checks.result import Check
from holdfast.system.linux.partial_files import partial_file

NUM_BYTES = 4 << 20  # bytes that are written to each disk
FEW_BYTES = 4096  # bytes that are written to a further folder on a disk
MAX_OFFSET_S = 5.0  # longest difference between this machine's clock and that of a file system
_NO_UNNAMED = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
_DIRECT_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.EACCES, errno.ENOENT, errno.ELOOP)


def check_disk(folder: Path, *, num_bytes: int = NUM_BYTES, stops: bool = True) -> Iterator[Check]:
    """Yield the results for the disk of a folder, and for its clock. Wrong bytes always stop the attempt."""
    try:
        data = os.urandom(_that_fit(folder, num_bytes))
        fd, is_named = _open_unnamed(folder)
        with os.fdopen(fd, "w+b") as file:
            before_s = time.time()
            started_s = time.perf_counter()
            file.write(data)
            file.flush()
            os.fsync(fd)
            write_s = time.perf_counter() - started_s
            offset_s = clock_offset_s(os.fstat(fd).st_mtime, before_s, time.time())
            started_s = time.perf_counter()
            found = _read_back(fd, len(data), folder)
            read_s = time.perf_counter() - started_s
    except OSError as error:
        yield Check("disk", str(folder), f"it cannot be written to: {error.strerror}", stops=stops)
        return
    values = {"written_bytes": len(data), "write_s": write_s, "read_s": read_s, "is_named": float(is_named)}
    at = first_difference(data, found)
    if at is None:
        yield Check("disk", str(folder), values=values)
    else:
        trouble = f"{len(data)} bytes were written, and other bytes were read back, from offset {at} on"
        yield Check("disk", str(folder), trouble, stops=True, is_wrong=True, values=values)
    yield _clock(folder, offset_s)


def clock_offset_s(modified_s: float, before_s: float, after_s: float) -> float:
    """Return the lead of a file system's clock, from a write between two times, or 0; pure."""
    if modified_s > after_s:
        return modified_s - after_s
    return min(0.0, modified_s - before_s)


def first_difference(written: bytes, found: bytes) -> int | None:
    """Return the first offset of a difference between two byte strings, or None."""
    if written == found:
        return None
    pairs = enumerate(zip(written, found, strict=False))
    return next((offset for offset, (one, other) in pairs if one != other), min(len(written), len(found)))


def _clock(folder: Path, offset_s: float) -> Check:
    values = {"offset_s": offset_s}
    if abs(offset_s) <= MAX_OFFSET_S:
        return Check("clock", str(folder), values=values)
    word = "behind" if offset_s > 0 else "ahead of"
    trouble = f"this machine's clock is {abs(offset_s):.0f} s {word} that of the file system"
    return Check("clock", str(folder), trouble, values=values)


def _that_fit(folder: Path, num_bytes: int) -> int:
    """Return the bytes to write to a folder. On a small disk, most of its space stays free for others."""
    found = os.statvfs(folder)
    share = found.f_bavail * found.f_frsize // 8 // FEW_BYTES * FEW_BYTES
    return max(FEW_BYTES, min(num_bytes, share))


def _open_unnamed(folder: Path) -> tuple[int, bool]:
    """Open a new file without a name. Return True if it had one at first."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600), False
    except OSError as error:
        if error.errno not in _NO_UNNAMED or not folder.is_dir():
            raise
    with partial_file(folder / "holdfast-check") as path:
        return os.open(path, flags), True


def _read_back(fd: int, num_bytes: int, folder: Path) -> bytes:
    """Return the bytes of a file, without the page cache if possible."""
    try:
        direct = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in _DIRECT_REFUSED:
            raise
        os.posix_fadvise(fd, 0, num_bytes, os.POSIX_FADV_DONTNEED)
        return os.pread(fd, num_bytes, 0)
    try:
        with mmap.mmap(-1, num_bytes) as buffer:  # aligned, as direct reads have to be
            size = os.preadv(direct, [buffer], 0)
            return buffer[:size]
    finally:
        os.close(direct)
