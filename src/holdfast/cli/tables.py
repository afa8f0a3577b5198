"""Output of results: tables and text within the width of the terminal, JSON and CSV for programs."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

from holdfast import errors
from holdfast.system.units import format_bytes, format_duration


class Column(NamedTuple):
    """Column of a table.

    In a too wide table a "name" is shortened in the middle, and a "text" is wrapped or placed below its row.
    """

    heading: str
    cell: Callable[[Any], object]  # returns the cell of a row: a text, a number, or None for `-`
    kind: Literal["left", "right", "name", "text"] = "left"
    spare: int = 0  # for a column that is left out if the table is too wide, its turn


_MAX_ROWS = 1000
"""Rows below each heading of a table that does not fit: they are printed before the next are laid out."""


def print_table(columns: Sequence[Column], rows: Iterable[Any]) -> None:
    """Print a table within the width of the terminal."""
    found = ([column.cell(row) for column in columns] for row in rows)
    cells = [["-" if cell is None else printable(str(cell)) for cell in row] for row in found]
    width = terminal_width()
    lines = _padded(columns, cells)
    if width is None or all(line.isascii() and len(line) <= width for line in lines):
        _print_lines(lines)
        return
    from holdfast.cli.layout import lay_out  # slow, and needed only for tables that do not fit

    for start in range(0, len(cells), _MAX_ROWS):
        _print_lines(lay_out(columns, cells[start : start + _MAX_ROWS], width))


def _padded(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a heading and rows as lines, with all columns, and each text whole."""
    table = [[column.heading for column in columns], *rows]
    widths = [max(map(len, texts)) for texts in zip(*table, strict=True)]
    sides = ["<>"[column.kind == "right"] for column in columns]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return [form.format(*row).rstrip() for row in table]


def _print_lines(lines: Sequence[str]) -> None:
    """Print a heading, bold on a terminal, and the rows below."""
    heading = f"\x1b[1m{lines[0]}\x1b[0m" if sys.stdout.isatty() else lines[0]
    out = sys.stdout.out if isinstance(sys.stdout, Printable) else sys.stdout  # it leaves the style as it is
    out.write(f"{heading}\n")
    print("".join(f"{line}\n" for line in lines[1:]), end="", flush=True)


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
    print_fields([(indent, text)], width=len(indent))


def print_fields(fields: Iterable[tuple[str, str]], *, width: int = 24) -> None:
    """Print a list of names and values, each value wrapped beside its name."""
    room = terminal_width()
    for name, value in fields:
        first, *others = [value] if room is None else textwrap.wrap(value, max(20, room - width)) or [""]
        print(f"{name:{width}}{first}".rstrip())
        for line in others:
            print(" " * width + line)


class Printable(io.TextIOBase):
    """A text stream that escapes control characters. Names in a checkpoint may contain them."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.flush, self.isatty, self.fileno = out.flush, out.isatty, out.fileno

    def write(self, text: str) -> int:
        """Write a text. Line breaks and tabs are not escaped."""
        self.out.write(errors.printable(text))
        return len(text)

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] read-only here
        """Encoding of the wrapped stream."""
        return self.out.encoding


def write_output(path: str, text: str, what: str) -> None:
    """Write the text of a result to a file atomically. `what` names it in errors: "the report to "."""
    from holdfast.checkpoint.restore.atomic_output import atomic_file  # few commands need it

    with naming_output(path, what), atomic_file(Path(path), overwrite=True) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def naming_output(path: str, what: str) -> Iterator[None]:
    """Name a result in the errors of its file; see `write_output`."""
    try:
        yield
    except (errors.InvalidInput, errors.RetryLater) as error:
        raise errors.InvalidInput(f"Cannot write {what}{path}: {error}") from error


def print_json(value: Any) -> None:
    """Print a value as indented JSON. JSON has no NaN and no infinity."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def print_result(args: argparse.Namespace, value: Any, text: str | Callable[[], object]) -> None:
    """Print a result: its value with `--json`, otherwise its text, or what a function prints."""
    if args.json:
        print_json(value)
    elif isinstance(text, str):
        print(text)
    else:
        text()


def may_remove(
    args: argparse.Namespace,
    columns: Sequence[Column],
    rows: Sequence[Any],
    *,
    nothing: str,
    question: str,
    refusal: str,
) -> bool:
    """Print what was chosen, and return True if it is to be removed: with `--yes`, or after asking.

    `refusal` ends the error where the command cannot ask.
    """
    is_real = bool(rows) and not args.dry_run
    if is_real and not args.yes and (args.json or not sys.stdin.isatty()):
        why = "--json does not ask" if args.json else "standard input is not a terminal"
        raise errors.InvalidInput(f"Add --yes: {why}. {refusal}")
    if not args.json and rows:
        print_table(columns, rows)
    elif not args.json:
        print(nothing)
    if is_real and not args.yes:
        print(f"{question} [y/N] ", end="", flush=True)
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    return is_real


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


def format_rate(num_bytes: int, seconds: float) -> str:
    """Return a duration with the speed, as in `1.2 s, 800 MB/s`."""
    speed = f", {format_bytes(num_bytes / seconds)}/s" if seconds else ""
    return f"{format_duration(seconds)}{speed}"


class Bar(NamedTuple):
    """Callbacks of the work: the bytes in all, and bytes that are done. They do nothing by default."""

    on_total: Callable[[int], None] = lambda _: None
    on_bytes: Callable[[int], None] = lambda _: None


NO_BAR = Bar()


@contextlib.contextmanager
def byte_bar(label: str) -> Iterator[Bar]:
    """Show a progress bar during the block, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield NO_BAR
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    # On a terminal, output is printed above the bar. If stdout is a pipe, it is not redirected.
    options = {"transient": True, "redirect_stdout": sys.stdout.isatty()}
    with Progress(*columns, console=Console(stderr=True), **options) as progress:
        task = progress.add_task(label, total=None)
        yield Bar(
            lambda num_bytes: progress.update(task, total=num_bytes),
            lambda num_bytes: progress.advance(task, num_bytes),
        )
