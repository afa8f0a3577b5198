"""Output of results: tables and text within the width of the terminal, JSON and CSV for programs."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from holdfast import errors
from holdfast.cli.columns import Table, lay_out
from holdfast.system.units import format_duration


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[str] = (),
    names: Sequence[str] = (),
    text: str | None = None,
    spare: Sequence[str] = (),
) -> None:
    """Print a table within the width of the terminal.

    Args:
        columns: the headings.
        rows: one text per column.
        right: headings of columns that are aligned to the right, such as numbers.
        names: headings of columns that are shortened in the middle if the table is too wide.
        text: heading of the last column if it has sentences, which are wrapped or placed below their row.
        spare: headings of columns that are left out if the table is too wide, the first one first.
    """
    table = Table(
        columns=tuple(columns),
        rows=tuple(tuple(map(printable, row)) for row in rows),
        right=frozenset(right),
        names=frozenset(names),
        text=text,
        spare=tuple(spare),
    )
    heading, *lines = lay_out(table, terminal_width())
    styled(sys.stdout).write(f"\x1b[1m{heading}\x1b[0m\n" if sys.stdout.isatty() else f"{heading}\n")
    for line in lines:
        print(line)


def terminal_width() -> int | None:
    """Return the width of the terminal or the variable COLUMNS, or None for a pipe."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return shutil.get_terminal_size().columns
    return None


def printable(text: str) -> str:
    """Escape the control characters of a text, including line breaks: they could redraw the terminal."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def print_text(text: str, *, indent: str = "") -> None:
    """Print sentences, wrapped at the width of the terminal and indented."""
    room = terminal_width()
    wrapped = [text] if room is None else textwrap.wrap(text, max(20, room - len(indent)))
    for line in wrapped or [""]:
        print(indent + line)


def print_fields(fields: Iterable[tuple[str, str]], *, width: int = 24) -> None:
    """Print a list of names and values, each value wrapped beside its name."""
    room = terminal_width()
    for name, value in fields:
        wrapped = [value] if room is None else textwrap.wrap(value, max(20, room - width)) or [""]
        print(f"{name:{width}}{wrapped[0]}".rstrip())
        for line in wrapped[1:]:
            print(" " * width + line)


class Printable(io.TextIOBase):
    """A text stream that escapes control characters. Names in a checkpoint may contain them."""

    def __init__(self, out: TextIO) -> None:
        self.out = out

    def write(self, text: str) -> int:
        """Write a text. Line breaks and tabs are not escaped."""
        self.out.write(errors.printable(text))
        return len(text)

    def flush(self) -> None:
        """Flush the wrapped stream."""
        self.out.flush()

    def isatty(self) -> bool:
        """Return True if the wrapped stream is a terminal."""
        return self.out.isatty()

    def fileno(self) -> int:
        """Return the descriptor of the wrapped stream."""
        return self.out.fileno()

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] read-only here
        """Encoding of the wrapped stream."""
        return self.out.encoding


def styled(out: TextIO) -> TextIO:
    """Return the stream that writes escape sequences unchanged."""
    return out.out if isinstance(out, Printable) else out


def print_json(value: Any) -> None:
    """Print a value as indented JSON. JSON has no NaN and no infinity."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def print_csv(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows as CSV (RFC 4180) with a heading."""
    import csv  # few commands need it

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)


def format_age(unix_s: float | None) -> str:
    """Format a time as an age, such as `5 min 20 s ago`."""
    if unix_s is None:
        return "-"
    age_s = time.time() - unix_s
    return f"{format_duration(age_s)} ago" if age_s >= 1 else "now" if age_s > -60 else "in the future"


def format_time(unix_s: float) -> str:
    """Format a time as local date and time, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))
