"""The table of a resharding result, as rows of text; resharding.py shows it and table.py writes it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from columns import NONE, seconds
from results import Spread

SAVED_ON, LOADED_ON = 2, (1, 2, 3, 4)
HEADINGS = ("call blocks", "durable", *(f"load {SAVED_ON} to {n}" for n in LOADED_ON))

Run = dict[str, Any]


def rows(runs: list[Run]) -> list[list[str]]:
    """One row for each peer: its title, the save, and each load with bytes read per byte needed."""
    return [
        _row([run for run in runs if run["peer"] == name]) for name in dict.fromkeys(r["peer"] for r in runs)
    ]


def _row(runs: list[Run]) -> list[str]:
    own = [run for run in runs if "values" in run]
    saves = [run for run in own if run["phase"] == "save"]
    cells = [_seconds([longest(run, key) for run in saves]) for key in ("blocked_s", "durable_s")]
    for ranks in LOADED_ON:
        loads = [run for run in own if run["phase"] == "load" and run["ranks"] == ranks]
        cells.append(f"{_seconds([longest(run, 'load_s') for run in loads])}, {_times(map(ratio, loads))}")
    return [runs[0].get("title", runs[0]["peer"]), *cells]


def longest(run: Run, key: str) -> float:
    """The seconds of the slowest rank."""
    return max(rank[key] for rank in run["values"])


def ratio(run: Run) -> float:
    """Bytes that all ranks have read, per byte that they needed."""
    needed = sum(rank["needed_bytes"] for rank in run["values"])
    return sum(rank["read_bytes"] for rank in run["values"]) / needed


def _seconds(values: list[float]) -> str:
    spread = Spread.of(values)
    return NONE if spread is None else seconds(spread)


def _times(values: Iterable[float]) -> str:
    spread = Spread.of(values)
    return NONE if spread is None else f"{spread.median:.2f} [{spread.least:.2f}..{spread.most:.2f}] x"
