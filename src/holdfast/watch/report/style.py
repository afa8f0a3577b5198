"""Figures of the page, which `assets/figures.json` declares, and the common style of all charts."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import cycle
from typing import Any, TypeVar

from holdfast.checkpoint.watch import WatchFigure
from holdfast.system.units import format_bytes, format_duration
from holdfast.watch.report.summary import RunSummary

Spec = dict[str, Any]  # a Vega-Lite specification, or a part of one
Row = tuple[Any, ...]
_T = TypeVar("_T")

MAX_ROWS = 500  # rows of a table on the page. `holdfast history` prints all
MAX_MARKS = 1500  # saves in a chart. With more, every second, third, ... is drawn


def make_figure(
    name: str,
    rows: Sequence[Row],
    *,
    lead: str = "",
    note: str = "",
    label: str = "",
    chart: Mapping[str, Any] | None = None,
) -> WatchFigure:
    """Return a figure of `assets/figures.json`, with the last `MAX_ROWS` rows in its table.

    Charts use names of colours. The style sheet of the page defines them for light and dark mode, so a chart
    follows the reader's setting without a second drawing.

    The text of the entry is between `lead` and `note`, and `label` replaces `$name` in the title and the
    columns. The values of `chart` replace the `$` names of the entry's chart. A layer whose `when` names an
    empty value is left out. The entry's `looks` have a colour, shape or dashes for each value of a field.
    """
    entry = _declared()["figures"][name]
    formats = entry.get("formats", [""] * len(entry["columns"]))
    shown = tuple(tuple(map(_format_cell, formats, row)) for row in rows[-MAX_ROWS:])
    text = " ".join(entry["text"])
    title, *columns = (one.replace("$name", label) for one in (entry["title"], *entry["columns"]))
    spec = None
    if chart is not None:
        known = {"span_axis": "".join(_declared()["span_axis"]), **chart}
        known.update({name: _make_look(look, chart) for name, look in entry.get("looks", {}).items()})
        known.update(_filled(entry.get("parts", {}), known))
        spec = {"legend_columns": entry.get("legend_columns", 2), **_filled(entry["chart"], known)}
    left_out = len(rows) - len(shown)
    return WatchFigure(title, f"{lead}{text}{note}", tuple(columns), shown, spec, left_out)


def _format_cell(kind: str, value: Any) -> str | int | None:
    """Return a cell in the format of its column; with a "?", an unknown value is an empty cell."""
    if not kind or (value is None and kind.endswith("?")):
        return value
    return _FORMATS[kind.removesuffix("?")](value)


@cache
def _declared() -> dict[str, Any]:
    return json.loads(read_asset("figures.json"))


def read_asset(name: str) -> str:
    """Return the text of a file of the page."""
    return (resources.files("holdfast.watch.report") / "assets" / name).read_text(encoding="utf-8")


def framed(chart: Mapping[str, Any]) -> Spec:
    """Return a chart in the style of the page, as wide as its container there."""
    columns = {"legend_columns": chart.get("legend_columns", 2)}
    own = {name: value for name, value in chart.items() if name != "legend_columns"}
    return {**_filled(_declared()["frame"], columns), **own}


def _make_look(look: Spec, values: Mapping[str, Any]) -> Spec:
    """Return an encoding with a distinct style for each value of a field that occurs in a chart."""
    field, declared, others = look["field"], look.get("values", {}), cycle(look.get("others", ()))
    rows = (row for part in values.values() if isinstance(part, list) for row in part)
    found = dict.fromkeys(row[field] for row in rows if isinstance(row, dict) and field in row)
    styles = {name: style for name, style in declared.items() if name in found}
    styles.update(zip((name for name in found if name not in declared), others, strict=False))
    names = list(styles)
    encoded = {"field": field, "type": "nominal", "sort": names}
    encoded["scale"] = {"domain": names, "range": list(styles.values())}
    legend = look.get("legend", True)
    return encoded if legend is True or (legend and len(names) > 1) else {**encoded, "legend": None}


def _filled(template: Any, values: Mapping[str, Any]) -> Any:
    """Return a part of a template with its `$` names replaced by values."""
    if isinstance(template, str):
        return values[template[1:]] if template.startswith("$") else template
    if isinstance(template, list):
        conditions = (one.get("when") if isinstance(one, dict) else None for one in template)
        parts = zip(template, conditions, strict=True)
        return [_filled(one, values) for one, when in parts if when is None or values[when]]
    if isinstance(template, dict):
        return {key: _filled(value, values) for key, value in template.items() if key != "when"}
    return template


def time_axis(field: str, summary: RunSummary, *, grid: bool = True) -> Spec:
    """Return a time axis in UTC, the same for all charts of a summary."""
    began, end = summary.started_unix_s or 0.0, summary.end_unix_s or 0.0
    formats = ((600, "%H:%M:%S"), (36 * 3600, "%H:%M"), (5 * 86400, "%-d %b %H:%M"), (math.inf, "%-d %b"))
    values = {
        "field": field,
        "domain": [to_ms(began), to_ms(max(end, began + 1))],
        "grid": grid,
        "format": next(text for longest_s, text in formats if end - began <= longest_s),
    }
    return _filled(_declared()["time_axis"], values)


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
    if percent < 0.001:
        return "under 0.001 %"
    return f"{percent:.1f} %" if percent >= 0.95 else f"{percent:.2g} %"


_FORMATS = {"time": format_time, "seconds": format_seconds, "size": format_size, "share": format_share}


def thin_out(items: Sequence[_T], noun: str = "") -> tuple[list[_T], str]:
    """Return the items to draw, and a sentence about it if some, which are named, are left out."""
    every = -(-len(items) // MAX_MARKS) or 1
    return list(items[::every]), "" if every == 1 else f" Of the {noun}, one of every {every} is drawn."
