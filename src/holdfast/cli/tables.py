"""Output of results: tables and text within the width of the terminal, JSON and CSV for programs."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
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


def print_table(columns: Sequence[Column], rows: Iterable[Any]) -> None:
    """Print a table within the width of the terminal."""
    cells = [[_shown(column.cell(row)) for column in columns] for row in rows]
    heading, *lines = lay_out(columns, cells, terminal_width())
    styled(sys.stdout).write(f"\x1b[1m{heading}\x1b[0m\n" if sys.stdout.isatty() else f"{heading}\n")
    for line in lines:
        print(line)


def _shown(cell: object) -> str:
    return "-" if cell is None else printable(str(cell))


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


def styled(out: TextIO) -> TextIO:
    """Return the stream that writes escape sequences unchanged."""
    return out.out if isinstance(out, Printable) else out


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


GAP = "  "
_CUT = "…"
_LEAST = {"name": 16, "text": 24}  # characters
_INDENT = "    "


def lay_out(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Return the lines of a table, the heading first."""
    headings = [column.heading for column in columns]
    natural = [max(map(_length, cells)) for cells in zip(headings, *rows, strict=True)]
    kept = list(range(len(columns)))
    texts = [i for i in kept if columns[i].kind == "text"]
    widths = dict(enumerate(natural))
    if width is not None:
        # The smallest readable width of each column.
        least = [
            min(most, max(_length(column.heading), _LEAST.get(column.kind, most)))
            for column, most in zip(columns, natural, strict=True)
        ]
        for i in [*texts, *sorted((i for i in kept if columns[i].spare), key=lambda i: columns[i].spare)]:
            if sum(least[j] for j in kept) + len(GAP) * (len(kept) - 1) > width:
                kept.remove(i)
        # Names and sentences share the rest of the width evenly.
        giving = sorted((i for i in kept if columns[i].kind in _LEAST), key=natural.__getitem__)
        room = width - len(GAP) * (len(kept) - 1) - sum(natural[i] for i in kept if i not in giving)
        for left, i in enumerate(giving):
            widths[i] = min(natural[i], max(4, room // (len(giving) - left)))
            room -= widths[i]
    lines = _lines([(columns[i], headings[i], widths[i]) for i in kept])
    for row in rows:
        lines += _lines([(columns[i], row[i], widths[i]) for i in kept])
        for i in texts:
            if i not in kept and row[i] not in ("", "-"):
                lines += _wrapped(row[i], (width or 0) - len(_INDENT), indent=_INDENT)
    return lines


def cut(text: str, width: int) -> str:
    """Shorten a text to `width` characters by leaving out its middle."""
    if _length(text) <= width:
        return text
    tail = max(0, width - 1) // 2
    head = max(0, width - 1 - tail)
    return _front(text, head) + _CUT + (_front(text[::-1], tail)[::-1] if tail else "")


def _lines(cells: Sequence[tuple[Column, str, int]]) -> list[str]:
    """Return the lines of one row, of texts and widths: several if its text is wrapped."""
    blocks = [
        _wrapped(text, width) if column.kind == "text" else [cut(text, width)]
        for column, text, width in cells
    ]
    lines = []
    for parts in itertools.zip_longest(*blocks, fillvalue=""):
        padded = []
        for part, (column, _, width) in zip(parts, cells, strict=True):
            blank = " " * (width - _length(part))
            padded.append(blank + part if column.kind == "right" else part + blank)
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


class Bar(NamedTuple):
    """Callbacks of the work. Both are None without a terminal."""

    on_total: Callable[[int], None] | None
    on_bytes: Callable[[int], None] | None


@contextlib.contextmanager
def byte_bar(label: str) -> Iterator[Bar]:
    """Show a progress bar during the block, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield Bar(None, None)
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
