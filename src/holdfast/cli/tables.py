"""Prints results: tables for people, JSON and CSV for programs."""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from holdfast.quantity import say_seconds

_UNBOUNDED = 1_000_000  # characters: what is piped is not cut to the width of a terminal


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Print a table.

    Args:
        columns: the headings.
        rows: one text per column.
        right: headings of columns that are aligned to the right, as numbers are.
    """
    from rich.console import Console  # not above: most commands' help must not wait for it
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else _UNBOUNDED, highlight=False, soft_wrap=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(
            Text(column), justify="right" if column in right else "left", overflow="fold", no_wrap=False
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    with console.capture() as text:
        console.print(table)
    for line in text.get().splitlines():
        print(line.rstrip())


def print_json(value: Any) -> None:
    """Print a value as indented JSON; the value must hold no NaN and no infinity, which JSON lacks."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def print_csv(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows as RFC 4180 CSV with a heading."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)


def say_age(unix_s: float | None) -> str:
    """How long ago a moment was: `5 min 20 s ago`."""
    if unix_s is None:
        return "-"
    age_s = time.time() - unix_s
    return f"{say_seconds(age_s)} ago" if age_s >= 1 else "now" if age_s > -60 else "in the future"


def say_moment(unix_s: float) -> str:
    """Local date and time, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def plural(number: int, noun: str) -> str:
    """`1 checkpoint`, `2 checkpoints`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
