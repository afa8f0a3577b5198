"""The table of a sharding result, as rows of text; sharding.py shows it and table.py writes it. Pure."""

from __future__ import annotations

import statistics
from typing import Any

GOALS = {"time": 1.03, "memory": 1.03}
"""What a ratio may be at most: two runs of one and the same thing differ by 3 % here. In memory too, for a
gather that ends earlier or later makes the peak higher or lower by a block."""
HEADINGS = (
    "ours, ms a step",
    "by hand",
    "time, ratio",
    "processor time, ratio",
    "peak, MB",
    "by hand",
    "ratio",
)

Run = dict[str, Any]


def rows(runs: list[Run]) -> list[list[str]]:
    """One row for each layout: its name, steps and their ratios, peaks and theirs."""
    return [_row(run) for run in runs]


def misses(run: Run) -> bool:
    """Whether a layout takes longer or more memory than it may."""
    found = {key: statistics.median(_ratios(run, key)) for key in ("s", "peak_bytes")}
    return found["s"] > GOALS["time"] or found["peak_bytes"] > GOALS["memory"]


def _row(run: Run) -> list[str]:
    milliseconds = [f"{statistics.median(run[who]['s']) * 1000:.0f}" for who in ("ours", "hand")]
    peaks = [f"{statistics.median(run[who]['peak_bytes']) / 1e6:.1f}" for who in ("ours", "hand")]
    ratios = [_spread(_ratios(run, key)) for key in ("s", "cpu_s", "peak_bytes")]
    return [run["layout"], *milliseconds, *ratios[:2], *peaks, ratios[2]]


def _ratios(run: Run, key: str) -> list[float]:
    return [ours / hand for ours, hand in zip(run["ours"][key], run["hand"][key], strict=True)]


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} [{min(values):.3f}..{max(values):.3f}]"
