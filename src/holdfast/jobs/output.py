"""Output of jobs: a log per node, limited in size, with times, read in blocks of lines."""

from __future__ import annotations

import heapq
import os
import struct
import time
from bisect import bisect_right
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from holdfast.errors import InvalidInput
from holdfast.system.linux.files import opened, punch_hole, write_atomic
from holdfast.system.units import format_bytes, parse_bytes

_CHUNK_BYTES = 1 << 20
_MAX_LINE_BYTES = 64 << 10  # longer lines are returned in parts


class OutputBlock(Struct, frozen=True):
    """Lines of one node that were written within a second. The last may be a part of a very long line."""

    node: int | None  # None: changes of the job's status
    data: bytes
    unix_s: float | None = None  # time of writing, to the second


class OutputSelection(Struct, frozen=True, kw_only=True):
    """Choice of a job's output."""

    follow: bool = False  # read until the job ends, and not only what was written so far
    node: int | None = None  # the only node to be read, or None for all
    tail: int | None = None  # number of lines at each node's end to begin with, or None for all lines
    is_timed: bool = False  # give each block its time
    with_changes: bool = False  # also read changes of the status


def last_texts(data: bytes) -> bytes:
    """Return lines as a terminal would show them after carriage returns: each with its last text only."""
    if b"\r" not in data:
        return data
    return b"\n".join(last_text(line) for line in data.split(b"\n"))


def last_text(line: bytes) -> bytes:
    """Return the text of a line after its last carriage return. Those at its end do not count."""
    if b"\r" not in line:
        return line
    line = line.rstrip(b"\r")
    return line[line.rfind(b"\r") + 1 :]


def with_prefix(data: bytes, prefix: bytes, *, is_line_start: bool) -> bytes:
    """Return lines with a prefix for each; the data begins a line or continues one."""
    if not prefix or not data:
        return data
    ends_line = data.endswith(b"\n")
    body = data[:-1] if ends_line else data
    body = body.replace(b"\n", b"\n" + prefix)
    return (prefix if is_line_start else b"") + body + (b"\n" if ends_line else b"")


def texts(block: OutputBlock) -> Iterator[str]:
    """Yield the lines of a block as text."""
    for line in block.data.removesuffix(b"\n").split(b"\n"):
        yield line.decode("utf-8", "replace")


class LogReader:
    """Reader of one log, which may not exist yet.

    It begins with the last `tail` lines, or at the offset `begin`, and stops at `end`. With `is_timed`, lines
    of different times are in different blocks. Without a node, they are changes of the job's status.
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
        self._times = times_path(path) if is_timed else None
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
        try:
            file = self._path.open("rb", buffering=0)
        except FileNotFoundError:
            self._tail = None  # all that is written from now on is new
            return
        with file:
            yield from self._read(file.fileno(), is_end=is_end)

    def _read(self, fd: int, *, is_end: bool) -> Iterator[OutputBlock]:
        if self._tail is not None:
            self._pos, self._tail = _tail_offset(fd, self._tail), None
        status = os.fstat(fd)
        if status.st_size < self._pos:  # emptied by its owner
            self._pos, self._rest = 0, b""
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
        end, done = begin + len(data), 0
        for size, unix_s in [*read_samples(self._times, begin, end), (end, modified_unix_s)]:
            to = len(data) if size >= end else data.rfind(b"\n", 0, size - begin) + 1
            if to > done:  # whole lines that were written until then
                yield OutputBlock(self.node, last_texts(data[done:to]), unix_s)
                done = to

    def _skip_removed(self, at: int) -> OutputBlock:
        """Skip a part that was removed, up to an offset, and return a line in its place."""
        removed = format_bytes(at - self._pos)
        lead = self._rest + b"\n" * bool(self._rest)
        note = f"holdfast: {removed} of output were removed here, to limit the log\n".encode()
        begin, self._pos, self._rest = self._pos, at, b""
        unix_s = None
        if self._times is not None:
            unix_s = next((time_s for _, time_s in read_samples(self._times, begin - 1, begin)), 0.0)
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


def last_lines(path: Path, num_lines: int) -> list[str]:
    """Return the last lines of a log, with long lines shortened to their end."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - (64 << 10)))
        lines = last_texts(file.read()).decode("utf-8", "replace").splitlines()
        return [line[-500:] for line in lines[-num_lines:]]
    return []


_SAMPLE = struct.Struct("<Qd")  # size of the log in bytes, and Unix time
_MAX_SIZE = 1 << 63
_MAX_TIMES_BYTES = 16 << 20  # limit of the file: a million samples. Then every second one is left out.


def times_path(log: Path) -> Path:
    """Return the path of the times of a log."""
    return log.with_suffix(".times")


def add_sample(path: Path, size: int, unix_s: float) -> None:
    """Record the size of a log at a time."""
    if path.exists() and path.stat().st_size >= _MAX_TIMES_BYTES:
        kept = read_samples(path, -1, _MAX_SIZE)[1::2]
        write_atomic(path, b"".join(_SAMPLE.pack(*sample) for sample in kept), is_durable=False)
    with opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as fd:
        os.write(fd, _SAMPLE.pack(size, unix_s))


def read_samples(path: Path, begin: int, end: int) -> list[tuple[int, float]]:
    """Return the sizes after `begin` with their times, up to the first size that is not less than `end`."""
    found: list[tuple[int, float]] = []
    with suppress(FileNotFoundError), path.open("rb") as file:
        fd = file.fileno()
        places = range(0, os.fstat(fd).st_size // _SAMPLE.size * _SAMPLE.size, _SAMPLE.size)
        first = bisect_right(
            places, begin, key=lambda place: _SAMPLE.unpack(os.pread(fd, _SAMPLE.size, place))[0]
        )
        file.seek(first * _SAMPLE.size)
        while len(data := file.read(_SAMPLE.size)) == _SAMPLE.size:
            found.append(_SAMPLE.unpack(data))
            if found[-1][0] >= end:
                break
    return found


LOG_LIMIT = "HOLDFAST_LOG_LIMIT"  # variable of a job with the bytes of output per node to keep, or `none`
DEFAULT_LOG_LIMIT = "1GiB"
_PAGE_BYTES = 4096
_MAX_HEAD_BYTES = 64 << 20


def limit_bytes(value: str) -> int | None:
    """Return the limit that the variable sets, or None for no limit."""
    if value.strip().lower() == "none":
        return None
    number = parse_bytes(value, LOG_LIMIT)
    if number < 1 << 20:
        raise InvalidInput(f"{LOG_LIMIT} must be at least 1MiB, got {value!r:.100}.")
    return number


def hole(size: int, limit: int) -> tuple[int, int]:
    """Return offset and length of the part that a too long log loses: not the beginning and the last half."""
    head = min(_MAX_HEAD_BYTES, limit // 4)
    begin = -(-head // _PAGE_BYTES) * _PAGE_BYTES
    end = (size - limit // 2) // _PAGE_BYTES * _PAGE_BYTES
    return begin, max(0, end - begin)


class LogSampler:
    """Sampler of one node's log, for the process that runs the node."""

    def __init__(self, log: Path, fd: int, limit: str) -> None:
        self._times = times_path(log)
        self._fd = fd
        self._size = os.fstat(fd).st_size
        try:
            self._limit = limit_bytes(limit)
        except InvalidInput as error:
            self._limit = limit_bytes(DEFAULT_LOG_LIMIT)
            self._write(f"{error} The limit is {DEFAULT_LOG_LIMIT}.")

    def poll(self) -> None:
        """Record a changed size, and remove the middle of a log that is too long."""
        status = os.fstat(self._fd)
        if status.st_size == self._size:
            return
        if status.st_size < self._size:  # emptied by its owner: the sizes must grow
            self._times.unlink(missing_ok=True)
        self._size = status.st_size
        try:
            add_sample(self._times, status.st_size, time.time())
            if self._limit is not None and status.st_blocks * 512 > self._limit:  # on disk
                begin, num_bytes = hole(status.st_size, self._limit)
                if num_bytes:
                    punch_hole(self._fd, begin, num_bytes)
        except OSError as error:
            self._write(f"this log is not limited, because its file system refused: {error}")
            self._limit = None

    def _write(self, text: str) -> None:
        os.write(self._fd, f"holdfast: {text}\n".encode())
