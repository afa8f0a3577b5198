"""Raw speed of the disk, and damage to a file."""

from __future__ import annotations

import errno
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

from holdfast.checkpoint.store import Store

_BLOCK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class RawWrite:
    """One raw write: a new file from aligned memory, with fsync."""

    num_bytes: int
    seconds: float
    is_direct: bool  # past the page cache, if the file system can


def write_raw(folder: Path, num_bytes: int) -> RawWrite:
    """Write and remove a file of about `num_bytes`, in whole blocks of 4 KiB.

    Blocks: until it is durable.
    """
    num_bytes = max(mmap.PAGESIZE, num_bytes - num_bytes % mmap.PAGESIZE)
    noise = mmap.mmap(-1, min(_BLOCK_BYTES, num_bytes))
    noise.write(os.urandom(len(noise)))  # some disks and hosts compress data
    path = folder / "raw"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o644)
        is_direct = True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        is_direct = False
    began = time.perf_counter()
    try:
        done = 0
        while done < num_bytes:
            done += os.pwrite(fd, memoryview(noise)[: min(len(noise), num_bytes - done)], done)
        os.fsync(fd)
    finally:
        os.close(fd)
        seconds = time.perf_counter() - began
        path.unlink()
    return RawWrite(num_bytes, seconds, is_direct)


@dataclass(frozen=True, slots=True)
class Damage:
    """One changed byte."""

    step: int
    attempt: int
    name: str
    offset: int
    before: int
    after: int  # as read back


def flip_byte(store: Store, name: str, *, step: int, attempt: int) -> Damage:
    """Flip all bits of the byte in the middle of an object."""
    content = bytearray(store.get(name))
    offset = len(content) // 2
    before = content[offset]
    content[offset] ^= 0xFF
    store.put(name, content)
    after = store.get(name)[offset]
    return Damage(step=step, attempt=attempt, name=name, offset=offset, before=before, after=after)
