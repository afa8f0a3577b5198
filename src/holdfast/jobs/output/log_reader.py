"""Reader of a growing log in blocks of lines, with memory for one block, and a watch for its changes."""

from __future__ import annotations

import ctypes
import heapq
import os
import select
from collections.abc import Collection, Iterator
from pathlib import Path

from holdfast.jobs.output.block import OutputBlock, last_text, last_texts
from holdfast.jobs.output.log_times import LogTimes
from holdfast.system.units import format_bytes

_CHUNK_BYTES = 1 << 20
_MAX_LINE_BYTES = 64 << 10  # longer lines are returned in parts
_IN_MODIFY, _IN_ATTRIB, _IN_CREATE, _IN_MOVED_TO = 0x2, 0x4, 0x100, 0x80
_EVENTS_BYTES = 1 << 16
_POLL_S = 5.0  # interval of polling where inotify is unavailable or misses changes


class LogReader:
    """Reader of one log.

    Args:
        path: the log. It may not exist yet.
        node: the node that writes it. None: it has changes of the job's status.
        tail: number of lines at the end to begin with. Default: all lines.
        is_timed: separate lines that were written at different times.
        begin: offset of the first byte to read, without `tail`.
        end: offset to stop at, even if the log is longer.
    """

    def __init__(
        self,
        path: Path,
        node: int | None = None,
        *,
        tail: int | None = None,
        is_timed: bool = False,
        begin: int = 0,
        end: int | None = None,
    ) -> None:
        self.node = node
        self._path, self._tail, self._end = path, tail, end
        self._times = LogTimes(path, begin=begin) if is_timed else None
        self._fd: int | None = None
        self._pos = begin
        self._rest = b""  # of an incomplete line

    @property
    def offset(self) -> int:
        """Offset of the first byte that was not returned. Valid after `blocks` is exhausted."""
        return self._pos - len(self._rest)

    @property
    def progress(self) -> bytes:
        """Present text of an incomplete line that is rewritten by carriage returns, or nothing."""
        return last_text(self._rest) if b"\r" in self._rest else b""

    def blocks(self, *, is_end: bool = False) -> Iterator[OutputBlock]:
        """Yield new lines in blocks. A block without a line break at its end continues, unless `is_end`."""
        if (fd := self._open()) is None:
            return
        status = os.fstat(fd)
        if status.st_size < self._pos:  # emptied by its owner
            self._pos, self._rest = 0, b""
        if self._times is not None:
            self._times.refresh()
        while True:
            if (at := _data_from(fd, self._pos)) > self._pos:
                yield self._skip_removed(at)
            left = _CHUNK_BYTES if self._end is None else max(0, self._end - self._pos)
            chunk = os.pread(fd, min(_CHUNK_BYTES, left), self._pos)
            if not chunk:
                break
            if _data_from(fd, self._pos) > self._pos:
                continue  # removed while it was read
            num_bytes = os.lseek(fd, self._pos, os.SEEK_HOLE) - self._pos
            yield from self._take(chunk[:num_bytes], status.st_mtime)
        if is_end and self._rest:
            yield from self._timed(self._rest, self._pos - len(self._rest), status.st_mtime)
            self._rest = b""

    def close(self) -> None:
        """Close the log."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _take(self, chunk: bytes, modified_unix_s: float) -> Iterator[OutputBlock]:
        begin = self._pos - len(self._rest)
        self._pos += len(chunk)
        data = self._rest + chunk
        end = data.rfind(b"\n") + 1
        self._rest = b""
        if end:
            yield from self._timed(data[:end], begin, modified_unix_s)
        rest = data[end:]
        if len(rest) > _MAX_LINE_BYTES and b"\r" in rest:
            bare = rest.rstrip(b"\r")
            rest = rest[bare.rfind(b"\r") + 1 :]
            if not rest.endswith(b"\r"):
                rest = b"\r" + rest  # still a line that is rewritten
        if len(rest) > _MAX_LINE_BYTES:
            yield from self._timed(rest, self._pos - len(rest), modified_unix_s)
            rest = b""
        self._rest = rest

    def _timed(self, data: bytes, begin: int, modified_unix_s: float) -> Iterator[OutputBlock]:
        if self._times is None:
            yield OutputBlock(self.node, last_texts(data))
            return
        for part, unix_s in self._times.split(data, begin, modified_unix_s):
            yield OutputBlock(self.node, last_texts(part), unix_s)

    def _open(self) -> int | None:
        if self._fd is None:
            try:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                self._tail = None  # all that is written from now on is new
                return None
            if self._tail is not None:
                self._pos = _tail_offset(self._fd, self._tail)
        return self._fd

    def _skip_removed(self, at: int) -> OutputBlock:
        """Skip a part that was removed, up to an offset, and return a line in its place."""
        removed = format_bytes(at - self._pos)
        lead = self._rest + b"\n" * bool(self._rest)
        note = f"holdfast: {removed} of output were removed here, to limit the log\n".encode()
        begin, self._pos, self._rest = self._pos, at, b""
        unix_s = None if self._times is None else self._times.at(begin, 0.0)
        return OutputBlock(self.node, last_texts(lead) + note, unix_s)


def _data_from(fd: int, pos: int) -> int:
    """Return the first offset from `pos` on that has data; at the end, `pos`."""
    try:
        return os.lseek(fd, pos, os.SEEK_DATA)
    except OSError:  # there is none, or the file system does not support the question
        return pos


def _tail_offset(fd: int, num_lines: int) -> int:
    """Return the offset of the last lines of a file. An incomplete line counts."""
    end = os.fstat(fd).st_size
    if not num_lines:
        return end
    left = num_lines + (end > 0 and os.pread(fd, 1, end - 1) == b"\n")
    while end > 0:
        begin = max(0, end - _CHUNK_BYTES)
        data_begin = _data_from(fd, begin)  # the rest was removed
        if data_begin >= end:
            return end
        chunk = os.pread(fd, end - data_begin, data_begin)
        at = len(chunk)
        while (at := chunk.rfind(b"\n", 0, at)) >= 0:
            left -= 1
            if not left:
                return data_begin + at + 1
        if data_begin > begin:
            return data_begin
        end = begin
    return 0


def interleaved(readers: Collection[LogReader], *, is_end: bool) -> Iterator[OutputBlock]:
    """Yield the new blocks of all nodes in the order of their times."""
    streams = [reader.blocks(is_end=is_end) for reader in readers]
    if len(streams) == 1:
        yield from streams[0]
    else:
        yield from heapq.merge(*streams, key=lambda block: block.unix_s or 0.0)


class FolderWatch:
    """Watch of folders, readable when a file in them changes."""

    def __init__(self, *folders: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        mask = _IN_MODIFY | _IN_ATTRIB | _IN_CREATE | _IN_MOVED_TO
        for folder in folders if self._fd >= 0 else ():
            libc.inotify_add_watch(self._fd, os.fsencode(folder), mask)

    def wait(self, timeout_s: float = _POLL_S) -> None:
        """Wait for a change since the last call."""
        if self._fd < 0:
            select.select([], [], [], min(timeout_s, 0.2))
            return
        if select.select([self._fd], [], [], timeout_s)[0]:
            os.read(self._fd, _EVENTS_BYTES)

    def close(self) -> None:
        """Stop watching."""
        if self._fd >= 0:
            os.close(self._fd)


def last_lines(path: Path, num_lines: int) -> list[str]:
    """Return the last lines of a log, with long lines shortened to their end."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - (64 << 10)))
            lines = last_texts(file.read()).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [line[-500:] for line in lines[-num_lines:]]
