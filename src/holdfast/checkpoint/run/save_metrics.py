"""Metrics of each save, found from metrics by step; pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

_MAX_SAVES = 256  # newest saves whose metrics may still change


@dataclass(slots=True)
class _Row:
    """Metrics of one save."""

    step: int
    values: dict[str, tuple[int, float]] = field(default_factory=dict)  # name -> step of the value, value
    is_sent: bool = False


class SaveMetrics:
    """Metrics of the newest saves of an attempt.

    For each name a save gets the value of its own step, else the newest value since the save before. The time
    of recording does not matter: a value may come after the save.
    """

    def __init__(self) -> None:
        self._saves: list[_Row] = []
        self._next: dict[str, tuple[int, float]] = {}  # since the newest save

    @property
    def newest(self) -> int:
        """Step of the newest save; -1 before the first."""
        return self._saves[-1].step if self._saves else -1

    def begin_save(self, step: int) -> None:
        """Add a save, which gets what was recorded since the one before. One of the same step is replaced."""
        if step < self.newest:
            return
        if step == self.newest:  # the save before has failed
            self._saves[-1].is_sent = False
            return
        found = {name: one for name, one in self._next.items() if one[0] <= step}
        if self._saves and not self._saves[-1].is_sent:  # it may have failed
            found = {**self._saves[-1].values, **found}
        self._next = {name: one for name, one in self._next.items() if one[0] > step}
        self._saves = [*self._saves[1 - _MAX_SAVES :], _Row(step, found)]

    def add(self, step: int, values: Mapping[str, float]) -> int | None:
        """Add values of a step. Returns the step of the save that they changed after `send`, if any."""
        index = bisect_left([row.step for row in self._saves], step)
        if index == len(self._saves):
            return self._put(self._next, step, values) and None
        row = self._saves[index]
        if index == 0 and len(self._saves) == _MAX_SAVES and step != row.step:
            return None  # of a save that is not known any more
        is_changed = self._put(row.values, step, values)
        return row.step if is_changed and row.is_sent else None

    @staticmethod
    def _put(known: dict[str, tuple[int, float]], step: int, values: Mapping[str, float]) -> bool:
        newer = {name: (step, value) for name, value in values.items() if known.get(name, (-1,))[0] <= step}
        is_changed = any(known.get(name) != one for name, one in newer.items())
        known.update(newer)
        return is_changed

    def value(self, step: int, name: str) -> float | None:
        """Return one value of a save; None if it was not recorded."""
        return next(
            (row.values[name][1] for row in self._saves if row.step == step and name in row.values), None
        )

    def send(self, step: int) -> dict[str, float]:
        """Return the metrics of a save. Later changes are reported by `add`."""
        for row in self._saves:
            if row.step == step:
                row.is_sent = True
                return {name: value for name, (_, value) in row.values.items()}
        return {}

    def of_other_steps(self, step: int) -> dict[str, int]:
        """Return the step of each value of a save that was recorded for another step."""
        rows = (row for row in self._saves if row.step == step)
        return {name: at for row in rows for name, (at, _) in row.values.items() if at != step}

    def has(self, step: int) -> bool:
        """Return True for the step of a save."""
        return any(row.step == step for row in self._saves)
