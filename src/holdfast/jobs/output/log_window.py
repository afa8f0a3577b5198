"""Window on growing logs: the newest lines of each node, within a limit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.jobs.output.block import OutputBlock
from holdfast.jobs.output.interleaving import interleaved
from holdfast.jobs.output.log_reader import LogReader

_MIN_BYTES = 4 << 10
_MAX_LINE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class LogWindow:
    """Lines of several nodes.

    Attributes:
        blocks: the lines, in the order of their times.
        offsets: by node, the offset in its log from where to continue.
        progress: by node, the present text of a line that is still being rewritten.
        skipped_bytes: output before these lines that was left out, because it exceeds the limit.
    """

    blocks: tuple[OutputBlock, ...]
    offsets: dict[int, int]
    progress: dict[int, bytes]
    skipped_bytes: int


def read_window(
    logs: Mapping[int, Path], offsets: Mapping[int, int], *, max_bytes: int, is_end: bool = False
) -> LogWindow:
    """Return the lines that follow the offsets. If they exceed the limit, only the newest.

    Args:
        logs: log of each node. They may not exist yet.
        offsets: from an earlier window. A node without an offset begins at its log's start.
        max_bytes: limit of all nodes together.
        is_end: no more output follows, so return incomplete last lines too.
    """
    share = max(_MIN_BYTES, max_bytes // max(1, len(logs)))
    readers: dict[int | None, LogReader] = {}
    skipped_bytes = 0
    with contextlib.ExitStack() as stack:
        for node, path in logs.items():
            begin, end, skipped = _bounds(path, offsets.get(node, 0), share)
            skipped_bytes += skipped
            readers[node] = LogReader(path, is_timed=True, begin=begin, end=end)
            stack.callback(readers[node].close)
        blocks = tuple(interleaved(readers, is_end=is_end))
        found = {node: reader for node, reader in readers.items() if node is not None}
        return LogWindow(
            blocks=blocks,
            offsets={node: reader.offset for node, reader in found.items()},
            progress={node: reader.progress for node, reader in found.items() if reader.progress},
            skipped_bytes=skipped_bytes,
        )


def _bounds(path: Path, offset: int, max_bytes: int) -> tuple[int, int, int]:
    """Return begin and end of the part to read, and the bytes skipped."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0, 0, 0
    try:
        size = os.fstat(fd).st_size
        if offset > size:  # emptied by its owner
            offset = 0
        if size - offset <= max_bytes:
            return offset, size, 0
        begin = _next_line(fd, size - max_bytes)
        return begin, size, begin - offset
    finally:
        os.close(fd)


def _next_line(fd: int, offset: int) -> int:
    """Return the offset of the next line, or `offset` within a very long line."""
    found = os.pread(fd, _MAX_LINE_BYTES, offset - 1).find(b"\n")
    return offset if found < 0 else offset + found
