"""Page cache of files: made durable, dropped, and the share that remains in it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)


def files_under(root: Path) -> Iterator[Path]:
    """Every plain file at or below `root`."""
    if root.is_file():
        yield root
    else:
        yield from (path for path in root.rglob("*") if path.is_file())


def sync(root: Path) -> None:
    """Fsync every file and directory at or below `root`, and the directory that holds it.

    Blocks: until all of it would survive a power cut.
    """
    directories = [path for path in root.rglob("*") if path.is_dir()] if root.is_dir() else []
    for path in [*files_under(root), *directories, root, root.parent]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def evict(root: Path) -> float:
    """Drop the files at or below `root` from the page cache; returns the share still cached, 0 to 1."""
    sync(root)
    for path in files_under(root):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return cached_share(root)


def cached_share(root: Path) -> float:
    """Share of the bytes at or below `root` that is in the page cache, 0 to 1."""
    cached = total = 0
    for path in files_under(root):
        in_file, pages = _cached_pages(path)
        cached, total = cached + in_file, total + pages
    return cached / total if total else 0.0


def _cached_pages(path: Path) -> tuple[int, int]:
    size = path.stat().st_size
    if not size:
        return 0, 0
    pages = -(-size // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * pages)()
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as view:
        # ctypes takes the address only of a writable buffer; a private mapping is one and is never written
        anchor = ctypes.c_char.from_buffer(view)
        status = _libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(size), flags)
        del anchor
    if status:
        raise OSError(ctypes.get_errno(), f"mincore failed on {path}")
    return sum(flag & 1 for flag in flags), pages
