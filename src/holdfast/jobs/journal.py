"""Documents of JSON, and append-only files of JSON lines. A torn or damaged line costs only itself."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from holdfast.errors import Corrupt
from holdfast.system.documents import MAX_BYTES, decode_as, to_plain
from holdfast.system.linux.files import open_regular, opened, reserve_space, write_atomic

_T = TypeVar("_T")

_RESERVED_BYTES = 16 << 10
"""Space behind the last line that is kept for further ones, so that an end can be recorded on a full disk."""


def encode(value: Any) -> str:
    """Return a struct, or several, as one line of JSON."""
    return json.dumps(to_plain(value), default=sorted)  # a set becomes a list


def write_document(path: Path, value: Any) -> None:
    """Write a struct as a document, which only its owner can read."""
    write_atomic(path, encode(value))


def load_document(path: Path, kind: type[_T], *, max_bytes: int = MAX_BYTES) -> _T:
    """Return a struct from its document, which exists."""
    with open_regular(path) as file:
        text = file.read(max_bytes + 1)  # the decoder refuses more
    return decode_as(kind, text, str(path), max_bytes=max_bytes, any_text=True)


def read_document(path: Path, kind: type[_T], *, max_bytes: int = MAX_BYTES) -> _T | None:
    """Return a struct from its document; None without one."""
    try:
        return load_document(path, kind, max_bytes=max_bytes)
    except FileNotFoundError:
        return None


def read_values(path: Path, kind: type[_T], *, tail_bytes: int | None = None) -> list[_T]:
    """Return the structs in a file, oldest first; see `lines`. Damaged ones are left out."""
    found: list[_T] = []
    for line in lines(path, tail_bytes=tail_bytes):
        with contextlib.suppress(Corrupt):  # torn by a kill
            found.append(decode_as(kind, line, str(path), any_text=True))
    return found


def append_value(path: Path, value: Any, *, is_durable: bool = True) -> None:
    """Append a struct to a file; see `append`."""
    with locked(path) as fd:
        append(fd, encode(value), is_durable=is_durable)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Open or create a file for appending, and hold its lock in the block."""
    with opened(path, os.O_RDWR | os.O_APPEND | os.O_CREAT) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd


def append(fd: int, line: str, *, is_durable: bool = True) -> None:
    """Append a line to a locked file, by default durably. A torn line before it stays apart."""
    end = os.lseek(fd, 0, os.SEEK_END)
    is_torn = end > 0 and os.pread(fd, 1, end - 1) != b"\n"
    data = b"\n" * is_torn + line.encode() + b"\n"
    if os.write(fd, data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with contextlib.suppress(OSError):  # then a full disk stops the next append, as it does elsewhere
        reserve_space(fd, end + len(data), _RESERVED_BYTES)
    if is_durable:
        os.fsync(fd)


def lines(path: Path, *, tail_bytes: int | None = None) -> list[bytes]:
    """Return the complete lines of a file, or of about its last `tail_bytes`, oldest first; [] if missing."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0 if tail_bytes is None else max(0, size - tail_bytes))
            found = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    return [line for line in found[:-1] if line]
