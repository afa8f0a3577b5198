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
from dataclasses import dataclass, replace
from typing import Any, TextIO

from holdfast import errors
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


GAP = "  "
_CUT = "…"
_MIN_NAME, _MIN_TEXT = 16, 24  # characters
_INDENT = "    "


@dataclass(frozen=True, slots=True)
class Table:
    """Cells and the roles of their columns, as the arguments of `print_table`."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    text: str | None = None
    spare: tuple[str, ...] = ()

    def without(self, column: str) -> Table:
        """Return the table without a column."""
        at = self.columns.index(column)
        return replace(
            self,
            columns=self.columns[:at] + self.columns[at + 1 :],
            rows=tuple(row[:at] + row[at + 1 :] for row in self.rows),
            text=None if column == self.text else self.text,
        )


def lay_out(table: Table, width: int | None) -> list[str]:
    """Return the lines of a table, the heading first.

    Args:
        width: in characters; None for no limit.
    """
    below: list[str] = []
    if width is not None:
        if table.text is not None and _least(table) > width:
            at = table.columns.index(table.text)
            below = [row[at] for row in table.rows]
            table = table.without(table.text)
        for column in table.spare:
            if column in table.columns and _least(table) > width:
                table = table.without(column)
    widths = _widths(table, width)
    lines = _lines(table, widths, table.columns)
    for number, row in enumerate(table.rows):
        lines += _lines(table, widths, row)
        if below and below[number] not in ("", "-"):
            lines += _wrapped(below[number], (width or 0) - len(_INDENT), indent=_INDENT)
    return lines


def cut(text: str, width: int) -> str:
    """Shorten a text to `width` characters by leaving out its middle."""
    if _length(text) <= width:
        return text
    tail = max(0, width - 1) // 2
    head = max(0, width - 1 - tail)
    return _front(text, head) + _CUT + (_front(text[::-1], tail)[::-1] if tail else "")


def _natural(table: Table) -> list[int]:
    return [max(map(_length, cells)) for cells in zip(table.columns, *table.rows, strict=True)]


def _least(table: Table) -> int:
    """Return the smallest readable width of the table."""
    least = {**dict.fromkeys(table.names, _MIN_NAME), **({table.text: _MIN_TEXT} if table.text else {})}
    found = [
        min(natural, max(_length(column), least.get(column, natural)))
        for column, natural in zip(table.columns, _natural(table), strict=True)
    ]
    return sum(found) + len(GAP) * (len(found) - 1)


def _widths(table: Table, width: int | None) -> list[int]:
    """Return the width of each column. Names and sentences share the rest of the width evenly."""
    widths = _natural(table)
    if width is None:
        return widths
    giving = [i for i, column in enumerate(table.columns) if column in table.names or column == table.text]
    room = width - len(GAP) * (len(widths) - 1) - sum(w for i, w in enumerate(widths) if i not in giving)
    for left, i in enumerate(sorted(giving, key=lambda i: widths[i])):
        share = max(4, room // (len(giving) - left))
        widths[i] = min(widths[i], share)
        room -= widths[i]
    return widths


def _lines(table: Table, widths: Sequence[int], cells: Sequence[str]) -> list[str]:
    """Return the lines of one row: several if its text is wrapped."""
    blocks = [
        _wrapped(cell, width) if column == table.text else [cut(cell, width)]
        for column, cell, width in zip(table.columns, cells, widths, strict=True)
    ]
    height = max(map(len, blocks), default=0)
    lines = []
    for number in range(height):
        padded = (
            _pad(block[number] if number < len(block) else "", width, is_right=column in table.right)
            for column, block, width in zip(table.columns, blocks, widths, strict=True)
        )
        lines.append(GAP.join(padded).rstrip())
    return lines


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    if _length(text) <= width:
        return [indent + text]
    lines: list[str] = []
    for num_chars in range(max(1, width), 0, -1):  # textwrap counts characters: some take two columns
        lines = textwrap.wrap(text, num_chars)
        if all(_length(line) <= width for line in lines):
            break
    return [indent + line for line in lines] or [indent]


def _pad(text: str, width: int, *, is_right: bool) -> str:
    blanks = " " * (width - _length(text))
    return blanks + text if is_right else text + blanks


def _front(text: str, width: int) -> str:
    """Return the longest beginning of a text that fits into a width."""
    while _length(text) > width:
        text = text[:-1] if _length(text) - width < 8 else text[: len(text) - (_length(text) - width) // 2]
    return text


def _length(text: str) -> int:
    """Return the width of a text on a terminal. Some characters take two columns."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # most tables are ASCII

    return cell_len(text)
