"""Contract of a tracker's library: continue a run, log rows of numbers, end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Place of a row in a run.

    Attributes:
        run: id of the run.
        attempt: number of the attempt that logs it.
        step: as the user counts.
    """

    run: str
    attempt: int
    step: int


class TrackedRun(ABC):
    """Run of one library. All calls are made by one thread; any may raise any error of the library."""

    @abstractmethod
    def begin(self, place: RowPlace) -> None:
        """Start the run, or continue it. Called before the first row of each attempt."""

    @abstractmethod
    def write(self, place: RowPlace, values: Mapping[str, float]) -> None:
        """Log a row, without the values of steps that the run has."""

    @abstractmethod
    def end(self, *, has_failed: bool) -> None:
        """Write what is buffered, and end the run."""
