"""Measured runs as values: medians and spreads by state, contestant and number. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Run = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and greatest of one number over the rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """The spread of some values, None if there are none."""
        found = list(values)
        return cls(statistics.median(found), min(found), max(found)) if found else None


@dataclass(frozen=True, slots=True)
class Results:
    """All runs of one benchmark.

    A run has `round`, `state`, `contestant`, `title` and one of `values`, `not_installed` or `error`.
    """

    runs: tuple[Run, ...]

    def states(self) -> list[str]:
        """States in the order measured."""
        return list(dict.fromkeys(run["state"] for run in self.runs))

    def contestants(self, state: str) -> list[str]:
        """Contestants of a state in the order of the first round, raw limits left out."""
        names = dict.fromkeys(run["contestant"] for run in self.of(state))
        return [name for name in names if name != "limits"]

    def of(self, state: str, contestant: str | None = None) -> list[Run]:
        """Runs of a state, or of one contestant on it."""
        return [r for r in self.runs if r["state"] == state and contestant in (None, r["contestant"])]

    def spread(self, state: str, contestant: str, key: str) -> Spread | None:
        """Spread of one number over the rounds."""
        values = (run.get("values", {}) for run in self.of(state, contestant))
        return Spread.of(found[key] for found in values if key in found)

    def paired(
        self,
        state: str,
        first: str,
        second: str,
        ratio: Callable[[dict[str, float], dict[str, float]], float],
    ) -> Spread | None:
        """Spread of `ratio(values of first, values of second)` within each round.

        The machine's speed drifts; two contestants of one round have seen about the same of it.
        """
        others = {run["round"]: run["values"] for run in self.of(state, second) if "values" in run}
        ones = {run["round"]: run["values"] for run in self.of(state, first) if "values" in run}
        try:
            return Spread.of(ratio(ones[number], others[number]) for number in ones if number in others)
        except KeyError:  # a number that is not measured on this state
            return None

    def training_lost(self, state: str, contestant: str) -> Spread | None:
        """Return the training time lost by one save, in copies of the state in memory.

        Every table and goal takes it from here. One unit holds for all contestants and rounds: the
        median of the raw limit. A ratio taken round by round would let one slow copy halve the loss.
        """
        lost, copy = self.spread(state, contestant, "lost_s"), self.spread(state, "limits", "memcpy_s")
        if lost is None or copy is None:
            return None
        return Spread(lost.median / copy.median, lost.least / copy.median, lost.most / copy.median)

    def trouble(self, state: str, contestant: str) -> str | None:
        """Why a contestant has no numbers, if it has none."""
        runs = self.of(state, contestant)
        if any("values" in run for run in runs):
            return None
        if any("not_installed" in run for run in runs):
            return "not installed"
        if not runs:
            return "not run"
        lines = str(runs[0].get("error", "no answer")).splitlines() or ["no answer"]
        return f"failed: {lines[0][:100]}"
