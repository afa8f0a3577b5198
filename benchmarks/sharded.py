"""The table of a sharding result, as rows of text; sharding.py shows it and table.py writes it. Pure."""

from __future__ import annotations

import statistics
from typing import Any

GOALS = {"time": 1.03, "memory": 1.01}
"""What a ratio may be at most: 3 % is what two runs of one and the same thing differ by here."""
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
    return statistics.median(_ratios(run, "s")) > GOALS["time"] or _memory(run) > GOALS["memory"]


def _row(run: Run) -> list[str]:
    milliseconds = [f"{statistics.median(run[who]['s']) * 1000:.0f}" for who in ("ours", "hand")]
    peaks = [f"{run[who]['peak_bytes'] / 1e6:.1f}" for who in ("ours", "hand")]
    ratios = [_spread(_ratios(run, key)) for key in ("s", "cpu_s")]
    return [run["layout"], *milliseconds, *ratios, *peaks, f"{_memory(run):.3f}"]


def _ratios(run: Run, key: str) -> list[float]:
    return [ours / hand for ours, hand in zip(run["ours"][key], run["hand"][key], strict=True)]


def _memory(run: Run) -> float:
    return run["ours"]["peak_bytes"] / run["hand"]["peak_bytes"]


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} [{min(values):.3f}..{max(values):.3f}]"
