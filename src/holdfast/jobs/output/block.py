"""Blocks of output, and the choice of them: whole lines of one node, as bytes; pure."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OutputBlock:
    """Lines of one node that were written within a second. The last may be a part of a very long line."""

    node: int | None  # None: changes of the job's status
    data: bytes
    unix_s: float | None = None  # time of writing, to the second
    is_progress: bool = False  # the present text of a line that is still being rewritten


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSelection:
    """Choice of a job's output."""

    follow: bool = False  # read until the job ends, and not only what was written so far
    node: int | None = None  # the only node to be read, or None for all
    tail: int | None = None  # number of lines at each node's end to begin with, or None for all lines
    is_timed: bool = False  # give each block its time
    with_changes: bool = False  # also read changes of the status
    with_progress: bool = False  # also read lines that are still being rewritten, if one node is read


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


def format_second(unix_s: float | None) -> str:
    """Return a time as local date and time, or dashes if it is unknown."""
    return "-------------------" if unix_s is None else time.strftime("%F %T", time.localtime(unix_s))
