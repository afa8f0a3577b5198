"""Layout of the columns of a table within a width. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

GAP = "  "
_CUT = "…"
_MIN_NAME, _MIN_TEXT = 16, 24  # characters
_INDENT = "    "


@dataclass(frozen=True, slots=True)
class Table:
    """Cells and the roles of their columns.

    Attributes:
        columns: the headings.
        rows: one text per column.
        right: headings of columns that are aligned to the right, such as numbers.
        names: headings of columns that are shortened in the middle if the table is too wide.
        text: heading of the last column if it has sentences, which are wrapped or placed below their row.
        spare: headings of columns that are left out if the table is too wide, the first one first.
    """

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
