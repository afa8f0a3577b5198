"""Measured runs as values: medians and spreads by state, contestant and number. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from comparison import Comparison, counted
from intervals import Interval, interval_of

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

    def comparisons(self, state: str, contestant: str) -> list[Comparison]:
        """Comparisons of trainings with and without a save that count, from all rounds."""
        runs = self.of(state, contestant)
        return counted([Comparison(**one) for run in runs for one in run.get("comparisons", [])])

    def training_lost(self, state: str, contestant: str) -> Interval | None:
        """Return the training time lost by one save, in seconds. Every table and goal takes it from here."""
        found = self.comparisons(state, contestant)
        return interval_of([one.lost_s for one in found]) if found else None

    def training_cpu(self, state: str, contestant: str) -> Interval | None:
        """Return the processor time of one save, in seconds."""
        found = self.comparisons(state, contestant)
        return interval_of([one.cpu_s for one in found]) if found else None

    def training_lost_copies(self, state: str, contestant: str) -> Interval | None:
        """Return the training time lost by one save, in copies of the state in memory.

        One unit holds for all of its comparisons: the median of the copies made between them. A ratio taken
        one by one would let one slow copy halve the loss.
        """
        lost, found = self.training_lost(state, contestant), self.comparisons(state, contestant)
        return lost.divided_by(statistics.median(one.copy_s for one in found)) if lost else None

    def trouble(self, state: str, contestant: str) -> str | None:
        """Return the reason why a contestant has no numbers, or None."""
        runs = self.of(state, contestant)
        if any("values" in run for run in runs):
            return None
        if any("not_installed" in run for run in runs):
            return "not installed"
        if not runs:
            return "not run"
        lines = str(runs[0].get("error", "no answer")).splitlines() or ["no answer"]
        return f"failed: {lines[0][:100]}"


def combine(documents: Iterable[dict[str, Any]]) -> tuple[Results, dict[str, dict[str, Any]]]:
    """Return the runs of every state from the first document that has it, and these documents."""
    runs: dict[str, list[Any]] = {}
    measured: dict[str, dict[str, Any]] = {}
    for document in documents:
        for state in {run["state"] for run in document["runs"]} - runs.keys():
            runs[state] = [run for run in document["runs"] if run["state"] == state]
            measured[state] = document
    return Results(tuple(run for state in sorted(runs) for run in runs[state])), measured
