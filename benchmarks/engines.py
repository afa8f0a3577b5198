"""The table of the engines of other projects, as text; others.py shows it and table.py writes it. Pure."""

from __future__ import annotations

from typing import Any

import columns
from columns import NONE
from results import Results

MEASURED = {
    "the call blocks": columns.COLUMNS[0],
    "copied after": columns.COLUMNS[1],
    "training lost": columns.COLUMNS[3],
    "processor time": columns.COLUMNS[4],
    "durable after": columns.COLUMNS[5],
    "load, cache dropped": columns.COLUMNS[6],
    "load, cached": columns.COLUMNS[7],
    "extra memory": columns.COLUMNS[8],
}
EXACT = {"loads back": "back", "changed during the save": "during", "a bit changed on disk": "damaged"}
HEADINGS = (*MEASURED, "on disk", *EXACT)
TROUBLED = {
    "training lost": "training",
    "processor time": "training",
    "load, cache dropped": "load",
    "load, cached": "load",
    "load, cold": "load",
}
"""Columns that have no numbers if that part of a run failed."""
SHORT = {
    "blocks": columns.SHORT[0],
    "training lost": columns.SHORT[1],
    "durable": columns.SHORT[2],
    "load, cold": columns.SHORT[3],
}
"""Columns of the terminal's table, which is 80 columns wide; `TROUBLED` has the parts of some of them."""
HEADINGS_IN_SHORT = (*SHORT, "exact")
HEADINGS_OF_MEDIANS = (*(column.heading for column in columns.SHORT), *EXACT)


def rows(results: Results, state: str) -> list[list[str]]:
    """Return one row of cells for each engine on a state, its title first."""
    return [_row(results, state, contestant) for contestant in results.contestants(state)]


def rows_in_short(results: Results, state: str) -> list[list[str]]:
    """Return medians of what most readers ask, one row for each engine, its title first."""
    return [_row_in_short(results, state, contestant) for contestant in results.contestants(state)]


def rows_of_medians(results: Results, state: str) -> list[list[str]]:
    """Return medians and verdicts, one row for each engine that ran, its title first."""
    found = []
    for contestant in results.contestants(state):
        run = results.of(state, contestant)[0]
        if results.trouble(state, contestant):
            continue
        title = run.get("title", contestant) + (f" ({run['version']})" if run.get("version") else "")
        cells = [column.cell(results, state, contestant) for column in columns.SHORT]
        verdicts = (run.get("exact", {}).get(key, NONE).partition(":")[0] for key in EXACT.values())
        found.append([title, *cells, *verdicts])
    return found


def _row_in_short(results: Results, state: str, contestant: str) -> list[str]:
    run = results.of(state, contestant)[0]
    title = run.get("title", contestant)
    if results.trouble(state, contestant):
        absent = "not installed" if "not_installed" in run else "failed"
        return [title, absent] + [NONE] * (len(HEADINGS_IN_SHORT) - 1)
    cells = [
        "failed"
        if TROUBLED.get(heading) in run.get("troubles", {})
        else column.cell(results, state, contestant)
        for heading, column in SHORT.items()
    ]
    outcomes = [run.get("exact", {}).get(key, NONE) for key in ("back", "during")]
    return [title, *cells, "yes" if outcomes == ["exact", "exact"] else "no"]


def _row(results: Results, state: str, contestant: str) -> list[str]:
    run = results.of(state, contestant)[0]
    title = run.get("title", contestant) + (f" ({run['version']})" if run.get("version") else "")
    if trouble := _trouble(results, state, contestant, run):
        return [title, trouble] + [NONE] * (len(HEADINGS) - 1)
    cells = [
        run.get("troubles", {}).get(TROUBLED.get(heading, ""), column.cell(results, state, contestant))
        for heading, column in MEASURED.items()
    ]
    size = results.spread(state, contestant, "disk_bytes")
    cells.append(f"{size.median / 1e6:.0f} MB" if size else NONE)
    if run.get("loads_with"):
        title += f", loaded with {run['loads_with']}"
    return [title, *cells, *(run.get("exact", {}).get(key, NONE) for key in EXACT.values())]


def _trouble(results: Results, state: str, contestant: str, run: dict[str, Any]) -> str | None:
    trouble = results.trouble(state, contestant)
    if trouble == "not installed":
        return f"not installed: Python has no module {run['not_installed']}"
    return trouble
