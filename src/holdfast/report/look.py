"""What a figure of the page is, and how all charts look."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from holdfast.quantity import say_bytes, say_seconds
from holdfast.report.story import Story

Spec = dict[str, Any]
"""A chart in Vega-Lite's own language, or a part of one."""
Cell = str | int | None
_T = TypeVar("_T")

MAX_ROWS = 500
"""Rows of a table on the page; `holdfast history` shows all."""
MAX_MARKS = 1500
"""Saves that a chart draws; of more, every second, third, ... is drawn."""

# Charts are given names of colours, not colours: the page's style sheet knows them for light and for dark,
# so that a chart changes with the reader's setting and needs no second drawing.
KEPT, REDO, DOWN, RESTORE = "var(--kept)", "url(#redo)", "url(#down)", "var(--restore)"
BLOCKED, ON_THE_WAY, BAD, INK = "var(--blocked)", "var(--way)", "var(--bad)", "var(--ink)"
_MUTED, _LINE = "var(--muted)", "var(--line)"
SPAN_AXIS = (
    "datum.value == 0 ? '0' : datum.value < 1 ? format(datum.value * 1000, '.3~r') + ' ms'"
    " : datum.value < 60 ? format(datum.value, '.3~r') + ' s'"
    " : datum.value < 3600 ? format(datum.value / 60, '.3~r') + ' min'"
    " : datum.value < 86400 ? format(datum.value / 3600, '.3~r') + ' h'"
    " : format(datum.value / 86400, '.3~r') + ' d'"
)
BYTES_AXIS = "format(datum.value, '.3~s') + 'B'"


@dataclass(frozen=True, slots=True)
class Figure:
    """One section of the page: a chart, what it shows in words, and its numbers as a table."""

    id: str
    title: str
    text: str  # plain text; a blank line begins a new paragraph
    spec: Spec | None  # None: there is nothing to draw
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    num_rows_left_out: int = 0


def figure(
    id: str, title: str, text: str, spec: Spec | None, columns: Sequence[str], rows: Sequence[Sequence[Cell]]
) -> Figure:
    """A figure whose table holds the last `MAX_ROWS` rows."""
    shown = tuple(tuple(row) for row in rows[-MAX_ROWS:])
    return Figure(id, title, text, spec, tuple(columns), shown, len(rows) - len(shown))


def chart(layers: Sequence[Spec], *, height: int, legend_columns: int = 2) -> Spec:
    """A chart of layers, as wide as its place on the page.

    Args:
        layers: drawn one over the other.
        height: in pixels.
        legend_columns: that fit beside each other on a telephone.
    """
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "background": "transparent",
        "layer": list(layers),
        "config": {
            # The page tells screen readers what a chart shows, and gives its numbers as a table.
            "aria": False,
            "font": "system-ui, sans-serif",
            "view": {"stroke": None},
            "axis": {
                "labelColor": _MUTED,
                "titleColor": _MUTED,
                "gridColor": _LINE,
                "tickColor": _LINE,
                "domainColor": _LINE,
                "labelFontSize": 12,
                "titleFontSize": 12,
                "titleFontWeight": "normal",
                "labelOverlap": True,
                "labelLimit": 120,
                "labelPadding": 5,
            },
            "legend": {
                "labelColor": INK,
                "labelFontSize": 12,
                "labelLimit": 260,
                "orient": "top",
                "direction": "horizontal",
                "columns": legend_columns,
                "symbolSize": 110,
                "title": None,
            },
            "text": {"fill": INK, "fontSize": 12},
        },
    }


def time_axis(field: str, story: Story, *, grid: bool = True) -> Spec:
    """An axis of moments, in UTC as the tables have them, the same for all charts of a story."""
    began, end = story.began_unix_s or 0.0, story.end_unix_s or 0.0
    formats = ((600, "%H:%M:%S"), (36 * 3600, "%H:%M"), (5 * 86400, "%-d %b %H:%M"), (math.inf, "%-d %b"))
    return {
        "field": field,
        "type": "temporal",
        "scale": {"type": "utc", "nice": False, "domain": [ms(began), ms(max(end, began + 1))]},
        "axis": {
            "title": "time (UTC)",
            "grid": grid,
            "format": next(text for longest_s, text in formats if end - began <= longest_s),
            "tickCount": {"expr": "max(2, width / 110)"},
        },
    }


def span_ticks(longest_s: float) -> list[float]:
    """Round durations from 0 to `longest_s` for an axis, in five steps or fewer; nobody counts 100 s."""
    if longest_s <= 0:
        return [0.0]
    round_s = (30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
    step = next((one for one in round_s if 60 < longest_s <= 5 * one), None)
    if step is None:
        scale = 86400 if longest_s > 60 else 1  # decimal below a minute, and in days
        step = scale * next(one for one in _decimals(-6, 7) if longest_s <= 5 * one * scale)
    return [i * step for i in range(int(longest_s / step) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between two positive ones for a logarithmic axis: 1, 2, 5, 10, or only powers of ten."""
    exponents = math.floor(math.log10(low)), math.ceil(math.log10(high))
    fine = [one for one in _decimals(*exponents) if low <= one <= high]
    coarse = [one for one in fine if math.isclose(math.log10(one), round(math.log10(one)))]
    return coarse if len(coarse) > 2 else fine


def span_log_ticks(low_s: float, high_s: float) -> list[float]:
    """Round durations between two for a logarithmic axis."""
    known = (*_decimals(-6, -1)[::3], 1, 10, 60, 600, 3600, 6 * 3600, 86400, 7 * 86400, 70 * 86400)
    found = [one for one in known if low_s <= one <= high_s]
    return found if len(found) > 1 else log_ticks(low_s, high_s)


def _decimals(first: int, last: int) -> list[float]:
    """1, 2 and 5 times each power of ten from `first` up to `last`."""
    return [float(f"{digit}e{exponent}") for exponent in range(first, last + 1) for digit in (1, 2, 5)]


def told_apart(field: str, looks: dict[str, str], *, legend: bool = True) -> Spec:
    """A fill, colour, shape or dash for each value of a field, in this order."""
    encoded: Spec = {
        "field": field,
        "type": "nominal",
        "scale": {"domain": list(looks), "range": list(looks.values())},
        "sort": list(looks),
    }
    return encoded if legend else {**encoded, "legend": None}


def ms(unix_s: float) -> float:
    """Milliseconds since 1970, as charts count."""
    return round(unix_s * 1000, 3)


def moment(unix_s: float | None) -> str:
    """Date and time in UTC, to the second."""
    if unix_s is None:
        return "-"
    return datetime.datetime.fromtimestamp(unix_s, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def seconds(value: float | None) -> str:
    """A duration for people; `-` if it is not known."""
    if value is None:
        return "-"
    said = say_seconds(value) if value else "0 s"
    return said if " 0 " not in said else said[: said.index(" 0 ")]  # `1 h`, not `1 h 0 min`


def size(value: float | None) -> str:
    """A size for people; `-` if there is none."""
    return say_bytes(value) if value else "-"


def share(value: float | None) -> str:
    """A share as percent, with two digits that count."""
    if value is None:
        return "-"
    percent = value * 100
    if percent == 0 or percent >= 9.95:
        return f"{percent:.0f} %"
    return (
        f"{percent:.1f} %" if percent >= 0.95 else f"{percent:.2g} %" if percent >= 0.001 else "under 0.001 %"
    )


def thinned(items: Sequence[_T]) -> tuple[list[_T], int]:
    """Items that can be drawn, and of how many each is one: 1 if all of them are drawn."""
    every = -(-len(items) // MAX_MARKS) or 1
    return list(items[::every]), every
