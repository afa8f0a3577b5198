"""Layout by rich of tables that do not fit the terminal; imported when such a table is printed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from holdfast.cli.tables import Column

_FLEXIBLE = ("name", "text")
_LEAST = 24  # characters of a name or a sentence


class Cell:
    """Text of a table: whole, or in a narrow column shortened in the middle, or wrapped, by its kind."""

    def __init__(self, text: str, kind: str) -> None:
        self.text, self.kind = text, kind
        self.width = cell_len(text)
        self.least = min(self.width, _LEAST) if kind in _FLEXIBLE else self.width

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(self.least, self.width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.text if self.kind == "text" else cut(self.text, options.max_width), overflow="fold")


def lay_out(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return the lines of a table, the heading first. Sentences that do not fit are below their rows."""
    cells = [[Cell(column.heading, "left") for column in columns]]
    cells += [[Cell(text, column.kind) for text, column in zip(row, columns, strict=True)] for row in rows]
    least = [max(cell.least for cell in column) for column in zip(*cells, strict=True)]
    kept = list(range(len(columns)))
    # Sentences go below first. A short one does not, nor does one that names its row.
    texts = [i for i in kept[1:] if columns[i].kind == "text" and any(row[i].width > _LEAST for row in cells)]
    for i in [*texts, *sorted((i for i in kept if columns[i].spare), key=lambda i: columns[i].spare)]:
        if sum(least[j] for j in kept) + 2 * (len(kept) - 1) > width:
            kept.remove(i)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    for i in kept:
        is_right, is_fixed = columns[i].kind == "right", columns[i].kind not in _FLEXIBLE
        table.add_column(justify="right" if is_right else "left", no_wrap=is_fixed)
    for row in cells:
        table.add_row(*(row[i] for i in kept))
    console = Console(width=width, color_system=None, force_terminal=False)
    lines = _lines(console, table)
    below = [i for i in texts if i not in kept]
    if not below:
        return lines
    sentences = [[row[i] for i in below if row[i].kind == "text" and row[i].text != "-"] for row in cells]
    indented = [
        [line for one in row for line in _lines(console, Padding(one, (0, 0, 0, 4)))] for row in sentences
    ]
    return [part for line, its in zip(lines, indented, strict=True) for part in (line, *filter(None, its))]


def _lines(console: Console, what: RenderableType) -> list[str]:
    return ["".join(part.text for part in line).rstrip() for line in console.render_lines(what, pad=False)]


def cut(text: str, width: int) -> str:
    """Shorten a text to `width` characters by leaving out its middle."""
    if cell_len(text) <= width:
        return text
    tail = max(0, width - 1) // 2
    return f"{set_cell_size(text, max(0, width - 1 - tail))}…{set_cell_size(text[::-1], tail)[::-1]}"
