"""Figures of the page, and the common style of all charts."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from holdfast.system.units import format_bytes, format_duration
from holdfast.watch.report.summary import RunSummary

Spec = dict[str, Any]
"""A Vega-Lite specification, or a part of one."""
Cell = str | int | None
_T = TypeVar("_T")

MAX_ROWS = 500
"""Rows of a table on the page. `holdfast history` prints all."""
MAX_MARKS = 1500
"""Saves in a chart. With more, every second, third, ... is drawn."""

# Charts use names of colours. The page's style sheet defines them for light and dark mode, so a chart
# follows the reader's setting without a second drawing.
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
    """One section of the page: a chart, its explanation, and its numbers as a table."""

    id: str
    title: str
    text: str  # plain text; a blank line separates paragraphs
    spec: Spec | None  # None: nothing to draw
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    num_rows_left_out: int = 0


def make_figure(
    id: str, title: str, text: str, spec: Spec | None, columns: Sequence[str], rows: Sequence[Sequence[Cell]]
) -> Figure:
    """Return a figure with the last `MAX_ROWS` rows in its table."""
    shown = tuple(tuple(row) for row in rows[-MAX_ROWS:])
    return Figure(id, title, text, spec, tuple(columns), shown, len(rows) - len(shown))


def make_chart(layers: Sequence[Spec], *, height: int, legend_columns: int = 2) -> Spec:
    """Return a chart of layers, as wide as its container on the page.

    Args:
        layers: layers from bottom to top.
        legend_columns: columns of the legend that fit on a phone.
    """
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "background": "transparent",
        "layer": list(layers),
        "config": {
            # The page describes charts to screen readers, and has their numbers as tables.
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


def time_axis(field: str, summary: RunSummary, *, grid: bool = True) -> Spec:
    """Return a time axis in UTC, the same for all charts of a summary."""
    began, end = summary.started_unix_s or 0.0, summary.end_unix_s or 0.0
    formats = ((600, "%H:%M:%S"), (36 * 3600, "%H:%M"), (5 * 86400, "%-d %b %H:%M"), (math.inf, "%-d %b"))
    return {
        "field": field,
        "type": "temporal",
        "scale": {"type": "utc", "nice": False, "domain": [to_ms(began), to_ms(max(end, began + 1))]},
        "axis": {
            "title": "time (UTC)",
            "grid": grid,
            "format": next(text for longest_s, text in formats if end - began <= longest_s),
            "tickCount": {"expr": "max(2, width / 110)"},
        },
    }


def span_ticks(longest_s: float) -> list[float]:
    """Return round durations from 0 to `longest_s` for an axis, in five steps or fewer."""
    if longest_s <= 0:
        return [0.0]
    round_s = (30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
    step = next((one for one in round_s if 60 < longest_s <= 5 * one), None)
    if step is None:
        scale = 86400 if longest_s > 60 else 1  # decimal below a minute, and in days
        step = scale * next(one for one in _decimals(-6, 7) if longest_s <= 5 * one * scale)
    return [i * step for i in range(int(longest_s / step) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers for a logarithmic axis: 1, 2, 5, 10, or only powers of ten."""
    exponents = math.floor(math.log10(low)), math.ceil(math.log10(high))
    fine = [one for one in _decimals(*exponents) if low <= one <= high]
    coarse = [one for one in fine if math.isclose(math.log10(one), round(math.log10(one)))]
    return coarse if len(coarse) > 2 else fine


def span_log_ticks(low_s: float, high_s: float) -> list[float]:
    """Return round durations between two for a logarithmic axis."""
    known = (*_decimals(-6, -1)[::3], 1, 10, 60, 600, 3600, 6 * 3600, 86400, 7 * 86400, 70 * 86400)
    found = [one for one in known if low_s <= one <= high_s]
    return found if len(found) > 1 else log_ticks(low_s, high_s)


def _decimals(first: int, last: int) -> list[float]:
    """Return 1, 2 and 5 times each power of ten from `first` up to `last`."""
    return [float(f"{digit}e{exponent}") for exponent in range(first, last + 1) for digit in (1, 2, 5)]


def color_by(field: str, looks: dict[str, str], *, legend: bool = True) -> Spec:
    """Return an encoding with a distinct style for each value of a field."""
    encoded: Spec = {
        "field": field,
        "type": "nominal",
        "scale": {"domain": list(looks), "range": list(looks.values())},
        "sort": list(looks),
    }
    return encoded if legend else {**encoded, "legend": None}


def to_ms(unix_s: float) -> float:
    """Return milliseconds since 1970, the unit of charts."""
    return round(unix_s * 1000, 3)


def format_time(unix_s: float | None) -> str:
    """Format date and time in UTC, to the second."""
    if unix_s is None:
        return "-"
    return datetime.datetime.fromtimestamp(unix_s, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def format_seconds(value: float | None) -> str:
    """Format a duration for display, or `-` if it is unknown."""
    if value is None:
        return "-"
    text = format_duration(value) if value else "0 s"
    return text if " 0 " not in text else text[: text.index(" 0 ")]  # `1 h`, not `1 h 0 min`


def format_size(value: float | None) -> str:
    """Format a size for display, or `-` if it is 0 or unknown."""
    return format_bytes(value) if value else "-"


def format_share(value: float | None) -> str:
    """Format a share as a percentage with two significant digits."""
    if value is None:
        return "-"
    percent = value * 100
    if percent == 0 or percent >= 9.95:
        return f"{percent:.0f} %"
    return (
        f"{percent:.1f} %" if percent >= 0.95 else f"{percent:.2g} %" if percent >= 0.001 else "under 0.001 %"
    )


def thin_out(items: Sequence[_T]) -> tuple[list[_T], int]:
    """Return the items to draw, and the number of items that each stands for."""
    every = -(-len(items) // MAX_MARKS) or 1
    return list(items[::every]), every
